"""Counts on the logarithmic grid against counts of the numbers themselves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.errors import ParameterError, TraceError
from tieline.trace.counts import N_BINS, LogHistogram, grid_points

POINTS = grid_points()
numbers = st.one_of(
    st.floats(0, math.inf),
    st.sampled_from(POINTS.tolist()),
    st.sampled_from(POINTS.tolist()).map(lambda x: math.nextafter(x, math.inf)),
    st.sampled_from(POINTS.tolist()).map(lambda x: math.nextafter(x, 0)),
    st.sampled_from([0.0, -0.0, 5e-324, math.inf]),
)
samples = st.lists(numbers, max_size=30).map(lambda x: torch.tensor(x, dtype=torch.float64))


def test_the_points_are_dyadic_and_32_to_an_octave():
    assert POINTS[0] == 2.0**-30
    assert POINTS[-1] == 2.0**14
    assert len(POINTS) == 44 * 32 + 1
    assert torch.equal(POINTS[32:], 2 * POINTS[:-32])
    assert torch.equal(POINTS[:33] * 2**30, 1 + torch.arange(33, dtype=torch.float64) / 32)


@given(samples)
def test_counts_at_grid_points_are_those_of_the_definition(values):
    histogram = LogHistogram.from_values(values)
    assert histogram.counts.shape == (N_BINS,)
    assert histogram.total == len(values)
    assert histogram.zeros == int((values == 0).sum())
    assert torch.equal(histogram.at_most(), (values[:, None] <= POINTS).sum(0))
    assert torch.equal(histogram.below(), (values[:, None] < POINTS).sum(0))


@given(samples.filter(len), st.floats(1e-6, 1))
def test_a_quantile_lies_in_its_bin(values, probability):
    low, high = LogHistogram.from_values(values).quantile(probability)
    rank = max(1, math.ceil(probability * len(values) - 1e-9))
    exact = values.sort().values[rank - 1].item()
    assert low <= exact <= high
    if POINTS[0] <= exact <= POINTS[-1]:
        assert high <= low * (1 + 1 / 32)
    if exact in POINTS or exact == 0:
        assert low == high == exact


def test_ranks_are_not_one_too_far():
    hundred = LogHistogram.from_values(POINTS[:100])
    assert hundred.quantile(0.07) == (POINTS[6], POINTS[6])  # 0.07 * 100 is 7.000000000000001


@given(samples, samples)
def test_histograms_add(first, second):
    joint = LogHistogram.from_values(torch.cat((first, second)))
    assert torch.equal(
        (LogHistogram.from_values(first) + LogHistogram.from_values(second)).counts, joint.counts
    )


@pytest.mark.parametrize("bad", [-1.0, math.nan, -math.inf])
def test_negative_numbers_and_nan_are_refused(bad):
    with pytest.raises(TraceError, match=">= 0"):
        LogHistogram.from_values(torch.tensor([1.0, bad]))


def test_a_quantile_of_nothing_is_refused():
    with pytest.raises(ParameterError, match="need a count"):
        LogHistogram.from_values(torch.zeros(0)).quantile(0.5)
