"""Loads and coalitions against plain counting."""

import math
from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import seeds
from tieline.core.errors import TielineError
from tieline.measure.expert_load import coalitions, expert_load, load_from_counts


def choices(seed, tokens, k, experts):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator) ** 3
    return order.argsort(dim=1)[:, :k]


@given(seeds, st.integers(1, 5))
def test_load_counts_tokens_per_expert(seed, k):
    chosen = choices(seed, 40, k, 6)
    count = Counter(chosen.flatten().tolist())
    load = expert_load(chosen.to(torch.int16), 6)
    assert list(load.counts) == [count[e] for e in range(6)]
    assert sum(load.share) == pytest.approx(1)
    entropy = -sum(c / (40 * k) * math.log(c / (40 * k)) for c in count.values())
    assert load.entropy == pytest.approx(entropy)
    assert load.evenness == pytest.approx(entropy / math.log(6))
    assert load.busiest == pytest.approx(6 * max(count.values()) / (40 * k))


def test_dead_and_cold_experts_are_told_apart():
    load = load_from_counts(torch.tensor([0, 4, 496, 500]), cold_below=0.02)
    assert (load.dead, load.cold) == ((0,), (1,))
    assert load_from_counts(torch.tensor([0, 4, 496, 500]), cold_below=0.01).cold == ()
    even = load_from_counts(torch.tensor([5, 5]))
    assert (even.evenness, even.busiest, even.dead, even.cold) == (pytest.approx(1), 1.0, (), ())
    assert load_from_counts(torch.tensor([7])).evenness == 1
    assert load_from_counts(torch.tensor([7, 0])).entropy == 0


@pytest.mark.parametrize(("experts", "k"), [(6, 2), (64, 8), (256, 9), (256, 1), (2, 2)])
def test_coalitions_are_sets(experts, k):
    chosen = choices(1, 300, k, experts)
    if experts > 60:
        chosen = torch.cat([chosen, chosen.flip(1)[:100]])
    count = Counter(tuple(sorted(row)) for row in chosen.tolist())
    counts = coalitions(chosen, experts)
    assert counts.seen == len(count)
    assert counts.once == sum(c == 1 for c in count.values())
    assert counts.log10_possible == pytest.approx(math.log10(math.comb(experts, k)), abs=1e-9)
    assert counts.tokens == len(chosen)


def test_all_coalitions_of_few_experts_are_told_apart():
    every = torch.tensor(list(combinations(range(7), 3)))
    assert coalitions(every, 7).seen == math.comb(7, 3)


def test_wide_coalitions_that_differ_in_one_expert_are_told_apart():
    rest = list(range(100, 110))
    assert coalitions(torch.tensor([[e, *rest] for e in range(50)]), 256).seen == 50
    assert coalitions(torch.tensor([[*rest, e] for e in range(200, 250)]), 256).seen == 50


@pytest.mark.parametrize("ids", [[[0, 6]], [[-1, 0]]])
def test_ids_that_are_no_experts_are_refused(ids):
    for function in (expert_load, coalitions):
        with pytest.raises(TielineError, match=r"0\.\.5"):
            function(torch.tensor(ids), 6)


def test_no_tokens_are_refused():
    with pytest.raises(TielineError, match="token"):
        expert_load(torch.zeros(0, 2, dtype=torch.long), 6)
    with pytest.raises(TielineError, match="token"):
        load_from_counts(torch.zeros(3, dtype=torch.long))
