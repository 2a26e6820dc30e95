"""Clustered standard errors against the formula, and against what correlation does to them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from tests.strategies import seeds
from tieline.core.errors import ShapeError
from tieline.core.statistics import (
    Estimate,
    SequenceSums,
    clustered_error,
    clustered_ratio,
    clustered_share,
    mean_limits,
)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 5)), min_size=2, max_size=8))
def test_mean_and_error_are_those_of_the_ratio_estimator(pairs):
    ratio = clustered_ratio(*(torch.tensor(column).double() for column in zip(*pairs, strict=True)))
    total, tokens, groups = sum(y for y, _ in pairs), sum(n for _, n in pairs), len(pairs)
    mean = total / tokens
    spread = groups / (groups - 1) * sum((y - mean * n) ** 2 for y, n in pairs)
    assert ratio.value == pytest.approx(mean)
    assert ratio.standard_error == pytest.approx(math.sqrt(spread) / tokens)


def test_a_ratio_of_either_sign_loses_the_error_that_both_sums_share():
    x = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sign in (1.0, -1.0):
        others = sign * (x + 0.2)
        ratio = clustered_ratio(1.1 * others + 0.01 * x.flip(0), others)
        assert ratio.value == pytest.approx(1.1, abs=0.02)
        assert ratio.standard_error < 0.02 < clustered_ratio(others, torch.ones(400)).standard_error
    assert clustered_ratio(x, 0 * x).value is None


def test_tokens_that_move_together_count_as_one():
    values = torch.randn(200, 1).expand(200, 50)
    together, alone = SequenceSums(), SequenceSums()
    together.add(values)
    alone.add(values[:, :1])
    error = alone.mean().standard_error
    assert together.mean().standard_error == pytest.approx(error)
    assert error == pytest.approx(values[:, 0].std().item() / math.sqrt(200), rel=0.01)


def test_one_sequence_has_no_spread_and_none_no_mean():
    sums = SequenceSums()
    assert sums.mean().value is None
    assert sums.joined().mean().value is None
    sums.add(torch.tensor([[1.0, 2.0]]))
    assert (sums.mean().value, sums.mean().standard_error) == (1.5, None)
    with pytest.raises(ShapeError, match="0 sums"):
        clustered_ratio(torch.ones(0), torch.ones(0))


def test_layers_are_joined_within_their_sequences():
    first_layer, second_layer = SequenceSums(), SequenceSums()
    for sums, sign in ((first_layer, 1.0), (second_layer, -1.0)):
        sums.add(torch.tensor([[sign, sign], [3 * sign, 3 * sign]]))
        sums.add(torch.tensor([[2 * sign]]))
    joined = first_layer.joined(second_layer).mean()
    assert joined.value == 0
    assert joined.standard_error == 0  # what one layer adds in a sequence the other takes away
    assert first_layer.joined().mean() == first_layer.mean()


def test_intervals_widen_where_documents_differ_and_hold_zero_counts():
    documents = torch.arange(1000) // 50
    alike = torch.arange(1000) % 10 == 0
    lumped = documents < 2
    narrow, wide = clustered_share(alike, documents), clustered_share(lumped, documents)
    assert narrow.value == wide.value == 0.1
    assert narrow.design_effect == 1.0
    assert wide.design_effect == pytest.approx(52.6, abs=0.1)  # about the size of a document
    assert wide.low < narrow.low < 0.1 < narrow.high < wide.high
    none = clustered_share(torch.zeros(1000, dtype=torch.bool), documents)
    assert (none.low, none.value) == (0.0, 0.0)
    student = special.stdtrit([999, 19], 0.975)  # 20 documents tell less than 1,000 tokens
    size = 1000 * (student[0] / student[1]) ** 2
    assert none.high == pytest.approx(1 - 0.025 ** (1 / size), rel=1e-6)


@pytest.mark.parametrize("documents", [1, 2, 3])
def test_few_documents_are_cut_into_stretches(documents):
    """With one degree of freedom the interval would be useless: 8e-17 to 0.48 in one case."""
    numbers = torch.arange(1200) * documents // 1200
    hits = torch.arange(1200) % 40 == 0
    share = clustered_share(hits, numbers)
    assert "stretches" in share.status
    assert 0.01 < share.low < 0.025 < share.high < 0.05
    lumps = clustered_share(torch.arange(1200) < 30, numbers)
    assert lumps.high > 2 * share.high  # all in one stretch
    assert lumps.low == 0.0


@given(seeds, st.integers(1, 600), st.integers(1, 40), st.floats(0, 1))
def test_limits_hold_the_share_and_say_nothing_beside_less_than_one_hit(
    seed, tokens, documents, rate
):
    generator = torch.Generator().manual_seed(seed)
    hits = torch.rand(tokens, generator=generator) < rate
    numbers = torch.randint(documents, (tokens,), generator=generator).sort().values
    share = clustered_share(hits, numbers)
    assert 0 <= share.low <= share.value <= share.high <= 1
    assert share.low == 0 or share.low > 0.02 / tokens
    chances = clustered_share(hits.double(), numbers)
    assert (chances.low, chances.high, chances.count) == (share.low, share.high, share.count)


def test_the_limits_of_a_mean_follow_student_and_stay_positive():
    mean = Estimate(2.0, 1.0)
    half = special.stdtrit(3, 0.975)
    assert mean_limits(mean, 4) == pytest.approx((2 - half, 2 + half))
    low, high = mean_limits(mean, 4, positive=True)
    assert (low * high, high / 2) == pytest.approx((4.0, math.exp(half / 2)))
    assert mean_limits(Estimate(2.0, None), 1) == (-math.inf, math.inf)
    assert mean_limits(Estimate(2.0, None), 1, positive=True) == (0.0, math.inf)
    assert mean_limits(Estimate(0.0, 0.0), 5, positive=True) == (0.0, 0.0)


@given(seeds)
def test_the_clustered_error_is_that_of_document_means_where_documents_are_equal(seed):
    values = torch.rand(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    documents = torch.arange(60) // 10
    means = values.reshape(6, 10).mean(1)
    expected = means.std().item() / math.sqrt(6)
    assert clustered_error(values, documents) == pytest.approx(expected)
    assert clustered_error(values, torch.zeros(60, dtype=torch.long)) is None


def test_the_interval_covers_the_truth_where_documents_have_rates_of_their_own():
    generator = torch.Generator().manual_seed(0)
    documents, covered = torch.arange(2000) // 100, 0
    for _ in range(200):
        rates = 0.2 * torch.rand(20, generator=generator)
        hits = torch.rand(2000, generator=generator) < rates[documents]
        rate = clustered_share(hits, documents)
        covered += rate.low <= 0.1 <= rate.high
    assert covered >= 184  # 95 % less three standard errors
