"""Flips, noise and attribution against planted truth; depth against its definition."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.planted import all_scores, layer_of, trace_of, without_scores
from tieline.analysis.comparison import flip_margins, set_flips, weight_moved
from tieline.analysis.diff import diff
from tieline.trace import LayerFacts, LayerTrace

seeds = st.integers(0, 2**16)
STEP = 1 / 64


def planted(seed, level, gaps, count=12):
    """Scores of A and B: each score moved by ±level, and planted flips of these gaps.

    Planted tokens get a gap of one of `gaps` between ranks k and k + 1 and change it in sign.
    """
    generator = torch.Generator().manual_seed(seed)
    a = all_scores(seed, layers=1, tokens=300)[0]
    signs = torch.randint(0, 2, a.shape, generator=generator).double() * 2 - 1
    b = a + level * signs
    rows = torch.randperm(300, generator=generator)[:count]
    for place, row in enumerate(rows.tolist()):
        order = a[row].argsort(descending=True)
        i, j = order[2], order[3]
        middle, gap = (a[row, i] + a[row, j]) / 2, gaps[place % len(gaps)]
        a[row, i], a[row, j] = middle + gap / 2, middle - gap / 2
        b[row] = a[row]
        b[row, i], b[row, j] = a[row, j], a[row, i]
    return a, b, rows


@given(seeds, st.sampled_from([1 / 1024, 1 / 4096, 0.0]))
def test_planted_flips_inside_and_outside_the_band_are_told_apart_exactly(seed, level):
    band = 6 * max(level, 2.0**-22)  # a float32 step of scores up to 4
    near = 0.02 if level else 0.5  # without noise the step of the scores may be half as wide
    outside, inside = [band * (1 + near), band * 400], [band / 4, band * (1 - near)]
    for gaps, expected in ((outside, "outside"), (inside, "inside")):
        a, b, rows = planted(seed, level, gaps)
        found = diff(trace_of([a]), trace_of([b])).layers[0]
        why = found.attribution
        assert found.flip.count == len(rows) == 12
        assert why.noise == pytest.approx(level, rel=1e-3, abs=0)  # scores are kept in float32
        assert why.unexplained == (12 if expected == "outside" else 0)
        assert why.inside == 12 - why.unexplained
        assert why.unexplained_first == why.unexplained
        places = {(int(t) // 60, int(t) % 60) for t in rows}
        named = {token[:2] for token in why.unexplained_tokens}
        assert named == (places if expected == "outside" else set())


@given(seeds)
def test_planted_flips_do_not_enter_the_noise(seed):
    level = 1 / 1024
    a, b, rows = planted(seed, level, [0.5], count=200)  # two thirds of the tokens
    b[rows] += 0.25  # what a flipped token's scores do says nothing about the noise of the others
    found = diff(trace_of([a]), trace_of([b])).layers[0]
    assert found.flip.count == 200
    assert found.attribution.noise == pytest.approx(level, rel=1e-3, abs=0)
    assert found.attribution.unexplained == 200


def test_gaussian_noise_leaves_next_to_nothing_unexplained_and_is_measured():
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(60_000, 16, generator=generator).double()
    noise = 0.02 * torch.randn(a.shape, generator=generator).double()
    layers = [layer_of(a, 2, "layers.0"), layer_of(a + noise, 2, "layers.0")]
    base = trace_of([a], k=2, documents=100)
    found = diff(*(replace(base, layers=(layer,)) for layer in layers)).layers[0]
    assert found.attribution.noise == pytest.approx(0.6745 * 0.02, rel=0.01)
    assert found.flip.count > 1000
    assert found.attribution.unexplained < 0.01 * found.flip.count


def by_definition(a, b, k):
    """Flips, margins and moved weight from the sets and scores of all experts, token by token."""
    flips, margins, moved = [], [], []
    for x, y in zip(a, b, strict=True):
        p, q = x.softmax(0), y.softmax(0)
        s, t = (set(z.argsort(descending=True, stable=True)[:k].tolist()) for z in (x, y))
        flips.append(s != t)
        w, v = ({e: (z[e] / z[sorted(c)].sum()).item() for e in c} for z, c in ((p, s), (q, t)))
        moved.append(sum(abs(w.get(e, 0) - v.get(e, 0)) for e in s | t) / 2)
        if s != t:
            sides = ((x, s - t, t - s), (y, t - s, s - t))
            margins.append(max(float(max(z[list(o)]) - min(z[list(i)])) for z, o, i in sides))
    return flips, margins, moved


@given(seeds, st.integers(1, 4))
def test_flips_margins_and_weights_match_their_definitions(seed, k):
    a, b = (all_scores(seed + i, layers=1, tokens=40)[0] for i in range(2))
    b = torch.where(torch.rand(40, 1) < 0.5, a, (a + b) / 2)
    first, second = (layer_of(z, k, "x", ranks=12) for z in (a, b))
    flips, margins, moved = by_definition(a, b, k)
    flipped, _ = set_flips(first, second)
    assert flipped.tolist() == flips
    both = [
        replace(x, experts=x.experts[flipped], scores=x.scores[flipped], weights=None)
        for x in (first, second)
    ]
    if any(flips):
        assert flip_margins(*both).tolist() == margins
    weight = weight_moved(first, second, flipped)
    assert weight.mean == pytest.approx(sum(moved) / 40, abs=1e-6)
    assert weight.largest == pytest.approx(max(moved), abs=1e-6)


def test_weights_of_the_same_run_move_nothing_and_of_other_experts_all():
    facts = LayerFacts(6, 2)
    weights = torch.tensor([[0.7, 0.1], [0.0, 0.0]])
    a = LayerTrace("x", facts, torch.tensor([[0, 1], [2, 3]]), weights=weights)
    b = replace(a, experts=torch.tensor([[4, 5], [3, 2]]), weights=weights)
    assert weight_moved(a, a, torch.tensor([False, False])).largest == 0
    moved = weight_moved(a, b, torch.tensor([True, False]))
    assert (moved.mean, moved.p99, moved.flipped_mean) == (0.5, 1.0, 1.0)


def test_a_score_that_was_not_kept_bounds_the_margin_from_below():
    z = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    far = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 9.0]])
    a, b = (layer_of(x, 2, "x", ranks=2) for x in (z, far))
    assert flip_margins(a, b).item() == 5.0  # B: 9 - 4; A knows only that expert 5 is below 2
    assert flip_margins(a, layer_of(far - 4 * (far == 9), 2, "x", ranks=2)).item() == 2.0


def test_ids_alone_are_not_attributable():
    trace = trace_of(all_scores(0))
    other = [z.clone() for z in all_scores(0)]
    other[2][:3] = -other[2][:3]
    found = diff(without_scores(trace), without_scores(trace_of(other)))
    assert found.layers[2].flip.count > 0
    assert all(layer.attribution is None for layer in found.layers)
    assert "not attributable: A has expert ids only" in found.verdict
    assert "unexplained" not in found.metrics
    assert found.layers[2].weight_status.startswith("not answerable")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"units": "softmax"}, "scores of A are logits, those of B softmax"),
        ({"n_groups": 3, "k_groups": 2}, "only B routes within groups"),
    ],
)
def test_scores_that_cannot_be_compared_are_not_attributed(change, reason):
    a = trace_of(all_scores(0, layers=1))
    facts = replace(a.layers[0].facts, **change)
    b = replace(a, layers=(replace(a.layers[0], facts=facts),))
    assert reason in diff(a, b).layers[0].attribution_status


def test_first_divergent_layer_and_compounding_over_depth():
    scores = all_scores(1, layers=3, tokens=100)
    other = [z.clone() for z in scores]
    other[0][:10] *= -1
    other[1][5:20] *= -1
    other[2][15:30] *= -1
    found = diff(trace_of(scores), trace_of(other)).tokens
    assert [step.first for step in found.depth] == [10, 10, 10]
    assert [round(step.cumulative, 12) for step in found.depth] == [0.1, 0.2, 0.3]
    assert (found.depth[1].after.count, found.depth[1].after.total) == (5, 10)
    assert (found.depth[1].fresh.count, found.depth[1].fresh.total) == (10, 90)
    assert found.depth[2].independent == pytest.approx(1 - 0.9 * 0.85 * 0.85)
    assert (found.anywhere.count, found.never) == (30, 70)
    assert found.choices == pytest.approx(40 / 300)
    assert found.depth[0].after.status == "no tokens"


def test_flips_after_an_earlier_one_are_told_from_first_ones():
    scores = all_scores(2, layers=2, tokens=200)
    other = [z.clone() for z in scores]
    other[0][:4] *= -1
    other[1][2:7] *= -1
    why = diff(trace_of(scores), trace_of(other)).layers[1].attribution
    assert (why.unexplained, why.unexplained_first) == (5, 3)
