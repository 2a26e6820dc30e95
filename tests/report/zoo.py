"""Results to draw: a routed model of random scores, its jumps, and text that tries to break out."""

import math

import torch

from tieline.analysis.inspect_observations import judge_routing, routing_observations
from tieline.analysis.inspect_records import (
    GapJumpTable,
    Inspection,
    JumpMeasures,
    JumpSample,
    LayerJumps,
    LossJumps,
    NoiseReport,
    OwnNoise,
    TextPiece,
    TextSample,
)
from tieline.analysis.served_precision import Serving
from tieline.core.ranking import stable_topk
from tieline.core.statistics import Estimate, Quantiles, mean_estimate
from tieline.measure.calibration_need import calibration_need
from tieline.measure.measures import measure
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace

EPSILONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
HOSTILE = (
    "<script>",
    "alert(1)",
    "</script>",
    "<!--",
    "&lt;",
    "\"'`",
    "\u2028",
    "{{data}}",
    "]]>",
    "<img src=x onerror=alert(2)>",
    "line\n",
    "\ttab",
    "é",
    "日本",
    "\x00",
    "\u202e",
    "",
)


def make_trace(layers=3, experts=8, k=2, tokens=200, units="logits", ids_only=False, seed=0):
    """Normal scores, a few exact ties, a dead expert and a busy one in every layer."""
    random = torch.Generator().manual_seed(seed)
    facts = LayerFacts(n_experts=experts, k=k, units=units)
    records = []
    for index in range(layers):
        scores = torch.randn(tokens, experts, generator=random) * (1 + index / layers)
        scores[:, 0] += 1.5
        scores[:, 1] -= 20
        scores[::50, 2 : 3 + k] = 9.0
        scores = scores.sigmoid() if units == "sigmoid" else scores
        ranked = stable_topk(scores, min(experts, k + 4))
        threshold = ranked.values[:, k - 1 : k, None]
        near = (scores[:, :, None] > threshold - torch.tensor(EPSILONS)).sum(dim=1)
        name = f"model.layers.{index}.mlp.gate"
        records.append(
            LayerTrace(name, facts, ranked.indices)
            if ids_only
            else LayerTrace(
                name,
                facts,
                ranked.indices,
                ranked.values,
                distance=torch.rand(tokens, generator=random),
                near=near,
            )
        )
    ids = torch.arange(tokens)
    return RoutingTrace(
        tuple(records), ids, ids // 50, ids % 50, () if ids_only else EPSILONS, {"model": "zoo"}
    )


def _sample(gaps, tokens, losses, random):
    count = len(tokens)
    jumps = torch.rand(count, generator=random).mul(0.6).tolist()
    return JumpSample(
        tokens=tuple(tokens.tolist()),
        documents=(0,) * count,
        positions=tuple(tokens.tolist()),
        gaps=tuple(gaps[tokens].tolist()),
        jumps=tuple(jumps),
        leaving=(0,) * count,
        entering=(1,) * count,
        losses=tuple(0.3 * x - 0.02 if x < 0.5 else None for x in jumps) if losses else None,
    )


def make_jumps(layer, losses=False, near=40, others=20, seed=0):
    """Jumps of random size at the smallest gaps and at some others."""
    random = torch.Generator().manual_seed(seed)
    order = layer.gap.argsort()
    close = _sample(layer.gap, order[:near], losses, random)
    far = _sample(layer.gap, order[near : near + others], False, random)
    quantiles = Quantiles((0.1, 0.5, 0.9), (0.05, 0.3, 0.5), (0.04, 0.25, 0.45), (0.06, 0.4, 0.6))
    large = torch.tensor([jump >= 0.1 for jump in close.jumps]).double()
    table = GapJumpTable(
        gap_levels=(0.0, 0.5, 1.0),
        gap_edges=(0.0, 0.5, 4.0),
        jump_edges=(0.0, 0.3, 0.6),
        counts=((10, 30), (12, 8)),
        shares=((0.05, 0.15), (0.5, 0.3)),
    )
    loss = LossJumps(Estimate(0.01, 0.002), quantiles, near) if losses else None
    return JumpMeasures(
        layer.name, close, far, quantiles, quantiles, mean_estimate(large), 0.1, table, loss
    )


def make_text(trace, scored=True, texts=HOSTILE):
    """A stretch of text whose tokens come closer and closer to a tie."""
    names = tuple(layer.name for layer in trace.layers)

    def piece(position, text):
        gaps = tuple(10 ** (1 - (position + layer) / 5) for layer in range(len(names)))
        gaps = gaps if scored else (None,) * len(names)
        return TextPiece(text, position, position, min(gaps) if scored else None, gaps)

    pieces = tuple(piece(position, text) for position, text in enumerate(texts))
    return TextSample(names, 0, pieces, (0.5 if scored else None,) * len(names))


def make_metrics(measures):
    rates = {f"flip@{rate.name}": rate.mean.value for rate in measures.model.precision}
    return {**rates, "dead": float(measures.model.dead), "evenness": measures.model.evenness}


def make_inspection(losses=False, jumps=True, text=True, model="zoo/moe", **trace_options):
    """A complete inspection; the options leave out sections."""
    trace = make_trace(**trace_options)
    measures = measure(trace)
    scored = trace.layers[0].scores is not None
    reason = "not answerable: the trace has expert ids only, no scores"
    layer_jumps = tuple(
        LayerJumps(layer.name, make_jumps(layer, losses, seed=index))
        if jumps and scored
        else LayerJumps(layer.name, None, "not measured: no model" if scored else reason)
        for index, layer in enumerate(trace.layers)
    )
    serving = make_serving(len(trace.layers)) if scored else None
    return Inspection(
        judgement=judge_routing(measures, layer_jumps, serving),
        observations=routing_observations(measures, layer_jumps),
        metrics=make_metrics(measures),
        measures=measures,
        jumps=layer_jumps,
        sample=make_text(trace, scored) if text else None,
        provenance={"model": model, "dtype": "float32", "text": {"name": "a.txt", "seed": 0}},
        timings={"total": 1.25, "tokens_per_second": math.pi * 1000},
        calibration=calibration_need(trace, 128),
        noise=make_noise(trace) if scored else NoiseReport((), reason),
        serving=serving,
    )


def make_serving(layers=3, kl=2e-4):
    """What bf16 does to the model."""
    estimates = [Estimate(0.04, 0.003), Estimate(kl, kl / 10), Estimate(kl / 4, kl / 40)]
    sizes = {"tokens": 4096, "sequences": 8, "layers": layers, "replay_bytes": 10 * layers}
    return Serving("bf16", *estimates, Estimate(1e-4, 3e-4), **sizes)


def make_noise(trace):
    """Orders of ties of every layer."""
    layers = tuple(
        OwnNoise(
            name=layer.name,
            precision="bf16",
            tokens=len(layer.experts),
            epsilon=0.01 * (index + 1),
            flipped=Estimate(0.02, 0.004),
            orders=(0.95, 0.03, 0.015, 0.005),
        )
        for index, layer in enumerate(trace.layers)
    )
    return NoiseReport(layers)
