"""Exact sums against rational arithmetic."""

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.errors import TraceError
from tieline.trace.counts import ExactMoments
from tieline.trace.record import identical_values

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
columns = st.lists(st.tuples(floats, floats), min_size=1, max_size=20)


@given(columns)
def test_mean_and_variance_are_those_of_rational_numbers(rows):
    moments = ExactMoments.from_scores(torch.tensor(rows, dtype=torch.float32))
    for rank in range(2):
        exact = [Fraction(row[rank]) for row in rows]
        mean = sum(exact) / len(exact)
        variance = sum(z * z for z in exact) / len(exact) - mean**2
        assert moments.mean()[rank].item() == float(mean)
        assert moments.variance()[rank].item() == float(variance)


@given(columns, columns, st.randoms())
def test_sums_do_not_depend_on_order_or_grouping(first, second, shuffle):
    rows = first + second
    joint = ExactMoments.from_scores(torch.tensor(rows))
    added = ExactMoments.from_scores(torch.tensor(first)) + ExactMoments.from_scores(
        torch.tensor(second)
    )
    assert identical_values(joint, added)
    shuffle.shuffle(rows)
    assert identical_values(joint, ExactMoments.from_scores(torch.tensor(rows)))


def test_many_scores_of_one_exponent_are_still_exact():
    count = 200_000  # above the number of tokens whose squares float64 can add exactly
    z = torch.full((count, 1), math.nextafter(2.0, 0), dtype=torch.float32)
    z[:] = torch.tensor(2.0 - 2.0**-23)
    moments, exact = ExactMoments.from_scores(z), Fraction(2) - Fraction(1, 2**23)
    assert moments.mean().item() == float(exact)
    assert moments.variance().item() == 0.0
    squares = sum(
        (high * 2**24 + low) * Fraction(2) ** (2 * (max(e, 1) - 150))
        for e, (high, low) in enumerate(
            zip(moments.high[0].tolist(), moments.low[0].tolist(), strict=True)
        )
    )
    assert squares == count * exact**2


def test_infinite_scores_are_left_out():
    moments = ExactMoments.from_scores(torch.tensor([[1.0, -math.inf], [3.0, 5.0]]))
    assert moments.count.tolist() == [2, 1]
    assert moments.mean().tolist() == [2.0, 5.0]
    assert moments.variance().tolist() == [1.0, 0.0]
    assert math.isnan(ExactMoments.from_scores(torch.full((1, 1), -math.inf)).mean().item())


def test_the_order_of_floats_would_matter_and_does_not_here():
    values = [1e30, 1.0, -1e30, 1e-30] * 50
    random.Random(0).shuffle(values)
    mean = ExactMoments.from_scores(torch.tensor(values)[:, None]).mean().item()
    exact = sum(map(Fraction, torch.tensor(values).tolist())) / len(values)
    assert mean == float(exact)


def test_the_smallest_numbers_have_the_unit_of_their_exponent():
    tiny = torch.tensor([[2.0**-149], [3 * 2.0**-149], [2.0**-126]])
    assert ExactMoments.from_scores(tiny).first[0, :2].tolist() == [4, 1 << 23]
    assert ExactMoments.from_scores(tiny[:2]).mean().item() == 2.0**-148
    assert ExactMoments.from_scores(tiny[:2]).variance().item() == 2.0**-298


def test_no_tokens_have_no_mean():
    assert math.isnan(ExactMoments.from_scores(torch.zeros(0, 1)).mean().item())


def test_ranks_must_agree():
    with pytest.raises(TraceError, match="1 and of 2 ranks"):
        ExactMoments.from_scores(torch.zeros(1, 1)) + ExactMoments.from_scores(torch.zeros(1, 2))
