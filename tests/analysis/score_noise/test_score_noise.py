"""Noise of the scores of two runs against its definition, token by token."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.planted import all_scores, layer_of
from tieline.analysis.score_noise import comparison_status, layer_noise, top_score_deviation
from tieline.trace import LayerFacts, LayerTrace

EVERY = np.ones(300, dtype=bool)


def pair(seed, size=0.05, ranks=4, k=3):
    """Scores on a grid and the same with noise, both as floats of 32 bits."""
    a = all_scores(seed, layers=1, tokens=300)[0]
    generator = torch.Generator().manual_seed(seed)
    b = (a + size * torch.randn(a.shape, generator=generator).double()).float().double()
    return a, b, layer_of(a, k, "x", ranks), layer_of(b, k, "x", ranks)


@given(st.integers(0, 2**16), st.integers(1, 9))
def test_the_variance_is_that_of_the_experts_that_both_kept(seed, ranks):
    a, b, first, second = pair(seed, 1.0, ranks)
    noise = layer_noise(first, second)
    for token in range(0, 300, 37):
        in_a, in_b = (x.experts[token].tolist() for x in (first, second))
        common = [e for e in in_a if e in in_b]
        if len(common) < 3:
            assert np.isnan(noise.variance[token])
        else:
            expected = np.var((b - a)[token, common].numpy(), ddof=1)
            assert noise.variance[token] == pytest.approx(expected, rel=1e-9)
        assert noise.common[token].tolist() == [e in common for e in in_a]


def test_what_all_scores_of_a_token_share_is_no_noise():
    a, _, first, _ = pair(0)
    shifts = torch.arange(300)[:, None].double() / 64
    noise = layer_noise(first, layer_of(a + shifts, 3, "x"))
    assert noise.variance.max() == 0
    assert noise.size(EVERY) == noise.relative(EVERY) == 0


def test_probabilities_have_the_noise_of_their_logits():
    a, b, first, second = pair(1, 0.01)
    facts = LayerFacts(12, 3, units="softmax")
    shares = [
        replace(x, facts=facts, scores=z.softmax(1).gather(1, x.experts))
        for x, z in ((first, a), (second, b))
    ]
    logits, noise = layer_noise(first, second), layer_noise(*shares)
    assert noise.variance == pytest.approx(logits.variance, rel=1e-6)


def test_noise_of_the_last_digits_counts_as_none_and_equal_scores_have_no_relative_size():
    _, _, first, second = pair(2, 1e-7)
    assert layer_noise(first, second).size(EVERY) == 0
    flat = replace(first, scores=torch.ones_like(first.scores))
    noise = layer_noise(flat, flat)
    assert noise.relative(EVERY) is None
    assert noise.size(~EVERY) is None


def test_the_spread_does_not_depend_on_the_ranks_that_were_kept():
    scores = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0)).double()
    for ranks in (4, 12, 60):
        layer = layer_of(scores, 4, "x", ranks)
        assert layer_noise(layer, layer).spread == pytest.approx(1, rel=0.15)
    assert top_score_deviation(16, 1) == 1.0


def test_what_cannot_be_compared_is_said():
    _, _, layer, _ = pair(3)
    bare = LayerTrace("x", layer.facts, layer.experts[:, :3])
    chosen = replace(layer, experts=layer.experts[:, :3], scores=layer.scores[:, :3])
    other = replace(layer, facts=replace(layer.facts, units="sigmoid"))
    grouped = replace(layer, facts=replace(layer.facts, n_groups=3, k_groups=2))
    assert comparison_status(layer, layer) == "ok"
    assert "B has expert ids only" in comparison_status(layer, bare)
    assert "A has the scores of chosen experts only" in comparison_status(chosen, layer)
    assert "scores of A are logits, those of B sigmoid" in comparison_status(layer, other)
    assert "only B routes within groups" in comparison_status(layer, grouped)
