"""p-values of flips: definitions, sound noise of every kind, and planted flips."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.planted import all_scores, layer_of
from tieline.analysis.comparison import flipped_tokens
from tieline.analysis.score_noise import flip_margins, flip_test, layer_noise, rejected_tests

seeds = st.integers(0, 2**16)
TOKENS = 6000


def judged(a, b, k=3, fresh=None):
    """Flip tests of one layer with these scores."""
    first, second = (layer_of(z, k, "x") for z in (a, b))
    flipped = flipped_tokens(first, second)[0].numpy()
    fresh = np.ones(len(a), dtype=bool) if fresh is None else fresh
    return flip_test(first, second, layer_noise(first, second), flipped, fresh)


def noises():
    """Noise whose size differs from token to token, by name; none of it is evidence."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(TOKENS, 12, generator=generator).double()
    sizes = torch.randn(TOKENS, 1, generator=generator).double().exp()
    heavy = normal / torch.rand(TOKENS, 1, generator=generator).double().sqrt()
    steps = (20 * normal).round() / 20
    return {"normal": normal, "sizes": normal * sizes, "heavy": heavy, "steps": steps}


@pytest.mark.parametrize("kind", noises())
@pytest.mark.parametrize("size", [0.002, 0.03])
def test_flips_of_sound_noise_are_explained(kind, size):
    a = torch.randn(TOKENS, 12, generator=torch.Generator().manual_seed(1)).double()
    flip_tests = judged(a, a + size * noises()[kind])
    assert flip_tests.tested >= 0.95 * len(flip_tests.p) > 10
    assert (flip_tests.p < 0.01).sum() <= 2 + 0.01 * len(flip_tests.p)
    assert not rejected_tests(flip_tests.p, 0.005).any()


@pytest.mark.parametrize("kind", ["normal", "sizes", "steps"])
def test_planted_flips_far_beyond_the_noise_of_their_token_are_found(kind):
    a = torch.randn(TOKENS, 12, generator=torch.Generator().manual_seed(2)).double()
    b = a + 0.001 * noises()[kind]
    order = a.argsort(dim=1, descending=True)
    rows = torch.arange(0, TOKENS, 400)
    i, j = order[rows, 0], order[rows, 4]  # the first and one left out change places
    b[rows, i], b[rows, j] = a[rows, j], a[rows, i]
    flip_tests = judged(a, b)
    odd = flip_tests.tokens[rejected_tests(flip_tests.p, 0.005)]
    assert set(rows.tolist()) <= set(odd.tolist())
    assert len(odd) <= len(rows) + 1


def test_a_flip_does_not_widen_the_noise_that_judges_it():
    a = torch.randn(TOKENS, 12, generator=torch.Generator().manual_seed(3)).double()
    b = a + 0.001 * noises()["normal"]
    i, j = a[7].argsort(descending=True)[[1, 3]]
    b[7, i], b[7, j] = b[7, j].item(), b[7, i].item()
    flip_tests = judged(a, b)
    row = flip_tests.tokens.tolist().index(7)
    assert flip_tests.noise[row] < 0.003
    assert flip_tests.p[row] < 1e-4


def test_ties_and_later_flips_are_no_evidence():
    a = torch.randn(TOKENS, 12, generator=torch.Generator().manual_seed(4)).double()
    order = a.argsort(dim=1, descending=True)
    a[9, order[9, 3]] = a[9, order[9, 2]]
    b = a + 0.001 * noises()["normal"]
    b[9] = a[9]
    b[9, order[9, 2]] -= 1e-9
    b[11] = -a[11]
    fresh = np.ones(TOKENS, dtype=bool)
    fresh[11] = False
    flip_tests = judged(a, b, fresh=fresh)
    assert 11 not in flip_tests.tokens
    assert flip_tests.p[flip_tests.tokens == 9].tolist() in ([], [1.0])


def test_few_tokens_or_ranks_give_no_p_value():
    a = torch.randn(50, 12, generator=torch.Generator().manual_seed(5)).double()
    flip_tests = judged(a, -a)
    assert (flip_tests.tested, flip_tests.p.min()) == (0, 1.0)
    b = a + torch.randn(a.shape, generator=torch.Generator().manual_seed(6)).double()
    narrow = judged(a[:, :3], b[:, :3], k=2)
    assert narrow.p.min() == 1.0


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0.001, 0.5))
def test_discoveries_match_the_rule_of_benjamini_and_hochberg(values, rate):
    p = np.array(values)
    ranked = sorted(values)
    passing = [i for i, x in enumerate(ranked, 1) if x <= rate * i / len(ranked)]
    limit = ranked[max(passing) - 1] if passing else -1.0
    rejected = rejected_tests(p, rate)
    assert rejected.sum() == (max(passing) if passing else 0)
    assert (p[rejected] <= limit).all()


def by_definition(a, b, k):
    """Flips and margins from the sets and scores of all experts, token by token."""
    flips, margins = [], []
    for x, y in zip(a, b, strict=True):
        s, t = (set(z.argsort(descending=True, stable=True)[:k].tolist()) for z in (x, y))
        flips.append(s != t)
        if s != t:
            sides = ((x, s - t, t - s), (y, t - s, s - t))
            margins.append(max(float(max(z[list(o)]) - min(z[list(i)])) for z, o, i in sides))
    return flips, margins


@given(seeds, st.integers(1, 4))
def test_margins_match_their_definition(seed, k):
    a, b = (all_scores(seed + i, layers=1, tokens=40)[0] for i in range(2))
    b = torch.where(torch.rand(40, 1) < 0.5, a, (a + b) / 2)
    first, second = (layer_of(z, k, "x", ranks=12) for z in (a, b))
    flips, margins = by_definition(a, b, k)
    rows = torch.tensor(flips).nonzero().squeeze(1)
    assert flip_margins(first, second, rows).tolist() == margins


def test_a_score_that_was_not_kept_bounds_the_margin_from_below():
    z = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    far = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 9.0]])
    a, b = (layer_of(x, 2, "x", ranks=2) for x in (z, far))
    only = torch.tensor([0])
    assert flip_margins(a, b, only).item() == 5.0  # B: 9 - 4; A knows expert 5 to be below 2
    near = layer_of(far - 4 * (far == 9), 2, "x", ranks=2)
    assert flip_margins(a, near, only).item() == 2.0


def test_groups_are_judged_by_the_gap():
    scores = torch.randn(300, 12, generator=torch.Generator().manual_seed(8)).double()
    layer = layer_of(scores, 3, "x")
    facts = replace(layer.facts, n_groups=3, k_groups=2)
    grouped = replace(layer, facts=facts, group_gap=torch.full((300,), 0.25))
    rows = torch.arange(300)
    expected = torch.minimum(layer.inner_gap, torch.tensor(0.25).double())
    assert flip_margins(grouped, grouped, rows).tolist() == expected.tolist()
