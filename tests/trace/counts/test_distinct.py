"""The sketch of different coalitions: exact while small, mergeable always."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tieline.trace import counts as distinct
from tieline.trace.counts import DistinctSketch, token_hash
from tieline.trace.record import identical_values

hashes = st.lists(st.integers(0, 12), max_size=9).map(lambda x: np.array(x, dtype=np.int64))


def sketch(values):
    return DistinctSketch.empty().with_hashes(values)


@settings(max_examples=200)
@given(hashes, hashes, hashes)
def test_sketches_merge_exactly_in_any_grouping(first, second, third):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distinct, "SKETCH_CAPACITY", 4)
        union = sketch(np.concatenate((first, second, third)))
        assert union.hashes.tolist() == sorted({*first, *second, *third})[:4]
        assert identical_values(union, sketch(first) + (sketch(second) + sketch(third)))
        assert identical_values(union, (sketch(third) + sketch(first)) + sketch(second))
        ceiling = sketch(first).ceiling
        assert identical_values(
            sketch(first) + sketch(second[second < ceiling]), sketch(first) + sketch(second)
        )


def test_few_things_are_counted_exactly():
    count = sketch(np.array([5, 5, 7, 0])).count()
    assert count == (3, 3, 0.0)
    assert DistinctSketch.empty().count() == (0, 0, 0.0)


@pytest.mark.parametrize("number", [4095, 5000, 100_000])
def test_many_things_are_estimated_within_four_standard_errors(number):
    values = token_hash(torch.arange(number), torch.zeros(number, dtype=torch.int64))
    count = sketch(np.concatenate((values, values))).count()
    assert count.at_least == min(number, 4096)
    assert abs(count.value - number) <= 4 * count.standard_error
    assert (count.standard_error == 0) == (number < 4096)
