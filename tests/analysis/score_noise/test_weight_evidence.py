"""Combine weights clear near-ties of softmax routers, and never those of another choice."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tieline as tl
from tieline.analysis.route_files import convert
from tieline.analysis.score_noise import mover_distances, weight_evidence, weights_rank_choices
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace
from tieline.trace.selection import select_tokens
from tieline.trace.store import load_trace

TOKENS = 2048
REAL = Path(os.environ.get("TIELINE_DATA", "missing")) / "real-routes"


def logged(logits, k, *, bias=0.0, weight=torch.softmax, experts=None):
    """A layer as a log stores it: ids, and weights that sum to one."""
    ids = (logits + bias).topk(k, dim=1).indices if experts is None else experts
    weights = weight(logits, 1).gather(1, ids)
    weights = (weights / weights.sum(1, keepdim=True)).float()
    layer = LayerTrace("layers.0", LayerFacts(logits.shape[1], k), ids, None, weights)
    number = torch.arange(len(logits))
    return RoutingTrace((layer,), torch.full_like(number, -1), number // 64, number % 64)


def noisy_pair(experts, size, seed=0):
    """Logits, and the same with normal noise."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, experts, generator=generator, dtype=torch.float64)
    noise = torch.randn(TOKENS, experts, generator=generator, dtype=torch.float64)
    return logits, logits + size * noise


@pytest.mark.parametrize(("experts", "k"), [(16, 3), (60, 4), (128, 8)])
@pytest.mark.parametrize("size", [0.003, 0.03])
def test_near_ties_are_cleared_and_their_noise_is_that_of_the_logits(experts, k, size):
    before, after = noisy_pair(experts, size)
    result = tl.diff(logged(before, k), logged(after, k))
    assert result.causes.conclusion == "near-ties, size unknown"
    (layer,) = result.layers
    assert layer.attribution.evidence == "weights"
    assert layer.attribution.noise == pytest.approx(size, rel=0.25)
    assert layer.attribution.relative == pytest.approx(size, rel=0.25)
    assert "the last place" in result.causes.flips.text


def test_the_expected_format_judges_the_size_of_noise_of_weights():
    before, after = noisy_pair(60, 0.01)
    sides = logged(before, 4), logged(after, 4)
    assert tl.diff(*sides, expect="bf16").causes.conclusion == "explained by ties"
    assert tl.diff(*sides, expect="tf32").causes.conclusion == "noise larger than expected"


@pytest.mark.parametrize("weight", [torch.softmax, lambda x, _: x.sigmoid()])
def test_a_selection_bias_leaves_it_undecided(weight):
    before, after = noisy_pair(60, 0.01)
    bias = 0.3 * torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sides = [logged(x, 4, bias=bias, weight=weight) for x in (before, after)]
    assert tl.diff(*sides).causes.conclusion == "cannot tell"


def test_a_recorded_bias_sigmoid_or_groups_are_not_judged_by_weights():
    layer = logged(noisy_pair(16, 0.0)[0], 4).layers[0]
    assert weights_rank_choices(layer)
    facts = {"units": "sigmoid"}, {"n_groups": 4, "k_groups": 2}
    for fact in facts:
        assert not weights_rank_choices(replace(layer, facts=replace(layer.facts, **fact)))
    assert not weights_rank_choices(replace(layer, bias=torch.zeros(16)))
    assert not weights_rank_choices(replace(layer, weights=None))
    assert not weights_rank_choices(replace(layer, weights=torch.zeros_like(layer.weights)))


def test_an_expert_from_far_below_is_not_cleared_although_it_takes_the_last_place():
    before, after = noisy_pair(60, 0.003)
    experts = after.topk(4, dim=1).indices
    experts[::10, 3] = after.argsort(dim=1, descending=True)[::10, 12]
    sides = logged(before, 4), logged(after, 4, experts=experts)
    evidence = weight_evidence(
        sides[0].layers[0],
        sides[1].layers[0],
        (sides[0].layers[0].experts.sort().values != experts.sort().values).any(1).numpy(),
        np.ones(TOKENS, dtype=bool),
    )
    assert evidence.is_near
    assert (evidence.test.p < 1e-3).sum() > 150
    result = tl.diff(*sides)
    assert result.causes.conclusion == "cannot tell"
    assert "experts leave or enter in other places" in result.causes.flips.text


def test_noise_as_large_as_the_spread_leaves_it_undecided():
    before, after = noisy_pair(16, 0.3)
    assert tl.diff(logged(before, 3), logged(after, 3)).causes.conclusion == "cannot tell"


def test_distances_are_those_of_their_definition():
    before, after = noisy_pair(8, 0.5)
    sides = [logged(x[:64], 4).layers[0] for x in (before, after)]
    logs = [
        replace(x, experts=x.experts[:, :4], scores=x.weights.double().log().float(), weights=None)
        for x in sides
    ]
    rows = [
        r
        for r in range(64)
        if set(sides[0].experts[r].tolist()) != set(sides[1].experts[r].tolist())
    ]
    distances = mover_distances(*logs, torch.tensor(rows))
    for index, row in enumerate(rows):
        a, b = (
            dict(zip(x.experts[row].tolist(), x.scores[row].double().tolist(), strict=True))
            for x in logs
        )
        common = a.keys() & b.keys()
        leaver, enterer = (max(v for e, v in x.items() if e not in common) for x in (a, b))
        shift = sum(b[e] - a[e] for e in common) / len(common)
        assert distances.to_last_a[index] == pytest.approx(leaver - min(a.values()))
        assert distances.to_last_b[index] == pytest.approx(enterer - min(b.values()))
        assert distances.between[index] == pytest.approx(enterer - leaver - shift)


@pytest.mark.skipif(not REAL.is_dir(), reason="TIELINE_DATA names no folder with real-routes")
def test_flips_between_two_gpus_are_near_ties_by_their_weights(tmp_path):
    names = ("qwen15moe-a100-bf16", "qwen15moe-rtx5080-gptq4")
    prompts = []
    for name in names:
        convert(REAL / f"{name}-layer0.jsonl.gz", tmp_path / name, to="trace", drop="warm-up")
        trace = load_trace(tmp_path / name)
        prompts.append(select_tokens(trace, trace.documents < 2))  # what follows was sampled
    result = tl.diff(*prompts)
    assert result.causes.conclusion == "near-ties, size unknown"
    (layer,) = result.layers
    assert (layer.flip.count, layer.flip.total) == (385, 1471)
    assert layer.attribution.noise == pytest.approx(0.034, abs=0.001)
    assert layer.attribution.last / layer.attribution.movers > 0.8
    assert tl.diff(*prompts, expect="int4_group").causes.conclusion == "explained by ties"
