"""Single swaps: margins by brute force, U uniform under any noise, expected numbers as seen."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.analysis.planted import layer_of
from tieline.analysis.noise_shapes import NoiseShape, find_patterns_without_reference
from tieline.analysis.score_noise import layer_noise
from tieline.analysis.single_swaps import (
    CLOSE,
    WIDE,
    exchanged_swaps,
    expected_swaps,
    swap_margins,
    swap_uniformity,
)
from tieline.core.ranking import ranked_choice, stable_topk

TOKENS, EXPERTS, K, SIZE = 60_000, 12, 3, 0.02
DOCUMENTS = np.arange(TOKENS) // 500


def drawn(seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(TOKENS, EXPERTS)))


def student(freedom):
    def draw(generator):
        return generator.standard_t(freedom, size=(TOKENS, EXPERTS))

    return draw


def spikes(rate, factor):
    def draw(generator):
        rare = generator.random((TOKENS, EXPERTS)) < rate
        return generator.normal(size=(TOKENS, EXPERTS)) * np.where(rare, factor, 1.0)

    return draw


def shared(generator):
    common = generator.normal(size=(TOKENS, 3)) @ generator.normal(size=(3, EXPERTS))
    return common / 2 + generator.normal(size=(TOKENS, EXPERTS)) / 2


NOISES = {
    "normal": lambda g: g.normal(size=(TOKENS, EXPERTS)),
    "laplace": lambda g: g.laplace(size=(TOKENS, EXPERTS)),
    "uniform": lambda g: g.uniform(-2, 2, size=(TOKENS, EXPERTS)),
    "t3": student(3),
    "t2.5": student(2.5),
    "spikes 1e-2": spikes(1e-2, 30),
    "spikes 1e-3": spikes(1e-3, 100),
    "token scales": lambda g: g.normal(size=(TOKENS, EXPERTS)) * g.gamma(1, 1, (TOKENS, 1)),
    "shared by experts": shared,
}


def pair(kind, seed=0):
    """A layer and the same with noise of this kind."""
    scores = drawn(1)
    noise = SIZE * torch.from_numpy(NOISES[kind](np.random.default_rng(100 + seed)))
    return layer_of(scores, K, "x"), layer_of(scores + noise, K, "x")


@pytest.mark.parametrize("kind", NOISES)
def test_u_is_uniform_under_noise_of_any_law(kind):
    p = swap_uniformity(*pair(kind))
    assert p is not None
    assert p > 0.001


@pytest.mark.parametrize("kind", ["normal", "t3", "spikes 1e-2", "token scales"])
def test_expected_swaps_are_seen(kind):
    swaps = expected_swaps(*pair(kind), DOCUMENTS)
    assert swaps is not None
    assert abs(swaps.counted - swaps.expected) < 4 * swaps.error + 0.06 * swaps.expected


def test_margins_are_those_of_the_experts_that_change_places():
    a, b = pair("normal")
    swaps = swap_margins(a, b)
    scores_a = drawn(1).numpy()
    for token, margin in zip(swaps.tokens[:50], swaps.margin_a[:50], strict=True):
        sets = [set(x.experts[token, :K].tolist()) for x in (a, b)]
        ((leaver,), (enterer,)) = sets[0] - sets[1], sets[1] - sets[0]
        expected = scores_a[token, leaver] - scores_a[token, enterer]
        assert margin == pytest.approx(expected, abs=1e-6)
    assert (swaps.margin_a >= 0).all()
    assert (swaps.margin_b >= 0).all()


def test_choices_that_do_not_follow_scores_are_not_uniform():
    a, b = pair("normal")
    gap = a.scores[:, K - 1] - a.scores[:, K]
    swapped = b.scores.clone(), b.experts.clone()
    near = (gap < 0.03).nonzero().flatten()
    for table, source in zip(swapped, (a.scores, a.experts), strict=True):
        table[near] = source[near]
        table[near, K - 1], table[near, K] = source[near, K], source[near, K - 1]
    scores = swapped[0]
    scores[near, K - 1] = a.scores[near, K - 1]
    scores[near, K] = a.scores[near, K - 1] - 1e-6
    p = swap_uniformity(a, type(b)(**(vars(b) | {"scores": scores, "experts": swapped[1]})))
    assert p is None or p < 1e-6


def test_scores_on_a_grid_and_too_much_noise_have_no_answer():
    a = pair("normal")[0]
    coarse = layer_of((drawn(1) + SIZE * drawn(2)).bfloat16().float(), K, "x")
    assert swap_uniformity(a, coarse) is None
    loud = layer_of(drawn(1) + 0.5 * drawn(2), K, "x")
    assert expected_swaps(a, loud, DOCUMENTS) is None
    few = [layer_of(drawn(i)[:50], K, "x") for i in (1, 2)]
    assert expected_swaps(*few, DOCUMENTS[:50]) is None


def patterns_of(a, b):
    """Patterns in a layer's exchanged scores without a reference run."""
    exchanged = exchanged_swaps(a, b, layer_noise(a, b), np.ones(len(a.experts), dtype=bool))
    return find_patterns_without_reference([NoiseShape("x", None, 0, exchanged=exchanged)])


def with_ranks_exchanged(layer, rows, rank, other):
    """The layer with two experts of some tokens in each other's rank, and with its score."""
    experts = layer.experts.clone()
    experts[rows, rank], experts[rows, other] = experts[rows, other], experts[rows, rank]
    return type(layer)(**(vars(layer) | {"experts": experts}))


@pytest.mark.parametrize("kind", NOISES)
def test_noise_of_any_law_exchanges_no_scores(kind):
    assert patterns_of(*pair(kind)) == ()


@pytest.mark.parametrize("kind", ["normal", "t2.5", "spikes 1e-2", "shared by experts"])
@pytest.mark.parametrize(("rank", "other"), [(K - 1, K), (0, K + 1)])
def test_exchanged_scores_are_named_in_one_token_of_fifty(kind, rank, other):
    a, b = pair(kind)
    rows = torch.arange(0, TOKENS, 50)
    (pattern,) = patterns_of(a, with_ranks_exchanged(b, rows, rank, other))
    assert pattern.kind == "exchanged scores"
    assert 0.2 * len(rows) < pattern.flips <= 1.1 * len(rows)  # of the others the gap is small


def test_probabilities_of_16_bits_that_a_router_takes_for_equal_are_no_exchange():
    scores = (0.02 * drawn(0)).float()  # probabilities around 1 / 12, two steps of bf16 apart
    close = (scores + 1e-5 * drawn(1)).float()
    chosen = stable_topk(close.softmax(1).bfloat16(), K).indices
    ranked = ranked_choice(close, chosen, K, EXPERTS)
    b = replace(layer_of(close, K, "x", EXPERTS), experts=ranked.indices, scores=ranked.values)
    a = layer_of(scores, K, "x", EXPERTS)
    swaps = swap_margins(a, b)
    assert (swaps.margin_a > 1e-3).sum() > 100
    assert patterns_of(a, b) == ()


def test_exchanges_are_counted_as_the_definition_says():
    a, b = pair("spikes 1e-2")
    b = with_ranks_exchanged(b, torch.arange(0, 3000, 50), K - 1, K)
    noise, fresh = layer_noise(a, b), np.arange(TOKENS) < 3000
    size, count = max(noise.size(fresh), noise.floor), 0
    for token in range(3000):
        sets = [set(x.experts[token, :K].tolist()) for x in (a, b)]
        if len(sets[0] - sets[1]) != 1:
            continue
        ((leaver,), (enterer,)) = sets[0] - sets[1], sets[1] - sets[0]
        before, after = (
            dict(zip(x.experts[token].tolist(), x.scores[token].double().tolist(), strict=True))
            for x in (a, b)
        )
        change = {e: after[e] - before[e] for e in before.keys() & after.keys()}
        rest = np.array([change[e] for e in change if e not in (leaver, enterer)])
        if len(rest) < 3 or not {leaver, enterer} <= change.keys():
            continue
        deviation = max(np.median(np.abs(rest - np.median(rest))) / 0.6745, size)
        margin = before[leaver] - before[enterer]
        errors = (
            change[leaver] - np.median(rest) + margin,
            change[enterer] - np.median(rest) - margin,
        )
        count += margin > WIDE * deviation and np.abs(errors).max() <= CLOSE * deviation
    assert exchanged_swaps(a, b, noise, fresh).count == count > 20
