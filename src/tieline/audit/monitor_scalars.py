"""The scalars of a training step: few numbers that say how the routing is.

    gap_p1, gap_p10, gap_p50   quantiles of the gap, all layers together             Def. 2.4
    ties                       share of gaps that are exactly zero                   Def. 1.2
    near_bf16                  P(Δ <= q), q the bf16 spacing at the threshold        Def. 2.1, 7.1
    tie_bf16, flip_bf16        share that ties, flips when rounded to bf16           Def. 7.4
    flips_per_token            Σ over layers of the expected flips by bf16 rounding  Def. 7.2, 7.3
    confidence                 largest softmax probability of a token
    max_violation              busiest expert over an even load, minus 1; worst layer
    dead_share                 experts that no token used                            Def. 8.2
    diversity                  exp(H) / E, H the entropy of the load                 Def. 8.1
    score_rms, score_max       of all logits
    active                     experts in use per token
    epsilon                    width of the band, where a gate is smooth

Where nothing else is said, a scalar is the mean over layers. What a layer cannot answer is absent:
gaps where all experts are used, bf16 where the size of the logits is unknown. The functions are
those of `tieline inspect`, so that the same tokens give the same numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.audit.monitor_calls import LogitSums, RouterCall
from tieline.geometry.boundary import boundary_mass
from tieline.geometry.load import ExpertLoad, load_from_counts
from tieline.geometry.predictions import precision_flips
from tieline.geometry.rounding import grid_step
from tieline.geometry.sections import check_finite, scored
from tieline.geometry.units import LogitView, logit_view
from tieline.numerics import quantile_bands
from tieline.trace.record import LayerTrace

__all__ = ["LayerScalars", "layer_scalars", "model_scalars", "spacing_mass"]

FORMAT = "bf16"
LEVELS = {"gap_p1": 0.01, "gap_p10": 0.1, "gap_p50": 0.5}
TINY = 1e-300


@dataclass(frozen=True, eq=False)
class LayerScalars:
    """A layer's part of the scalars; `units` tells which gaps may be pooled."""

    gaps: Float[Tensor, " tokens"] | None
    units: str
    rounding: dict[str, float]
    load: ExpertLoad
    logits: LogitSums
    active: float
    epsilon: float | None

    def plain(self) -> dict[str, float]:
        """The scalars of this layer alone."""
        return model_scalars({"": self})


def layer_scalars(calls: Sequence[RouterCall]) -> LayerScalars:
    """What the calls of one router during a step come to, each token counting alike."""
    tokens = torch.tensor([call.tokens for call in calls], dtype=torch.float64)
    rows = [_rounding(call.trace) for call in calls]
    sums = [call.logits for call in calls if call.logits is not None]
    squares, _, sure, _, _ = (_mean(column, tokens) for column in zip(*sums, strict=True))
    logits = LogitSums(
        squares,
        max(one.largest for one in sums),
        sure,
        min(one.least for one in sums),
        max(one.row_error for one in sums),
    )
    answers = all(scored(call.trace) == "ok" for call in calls)
    used = torch.stack([call.used for call in calls]).sum(dim=0)
    return LayerScalars(
        gaps=torch.cat([call.trace.gap for call in calls]) if answers else None,
        units=calls[0].trace.facts.units,
        rounding={name: _mean([row[name] for row in rows], tokens) for name in rows[0]},
        load=load_from_counts(used),
        logits=logits,
        active=_mean([call.active for call in calls], tokens),
        epsilon=calls[-1].epsilon,
    )


def model_scalars(layers: Mapping[str, LayerScalars]) -> dict[str, float]:
    """The scalars of all layers together."""
    every = list(layers.values())
    loads, logits = [one.load for one in every], [one.logits for one in every]
    found = _gap_scalars(every)
    for name in ("near_bf16", "tie_bf16", "flip_bf16"):
        known = [one.rounding[name] for one in every if name in one.rounding]
        if known:
            found[name] = sum(known) / len(known)
    if "near_bf16" in found:
        found["flips_per_token"] = sum(one.rounding.get("expected", 0.0) for one in every)
    diversity = [math.exp(load.entropy) / len(load.counts) for load in loads]
    found |= {
        "confidence": sum(one.confidence for one in logits) / len(every),
        "max_violation": max(load.busiest for load in loads) - 1,
        "dead_share": sum(len(x.dead) for x in loads) / sum(len(x.counts) for x in loads),
        "diversity": sum(diversity) / len(every),
        "score_rms": math.sqrt(sum(one.mean_square for one in logits) / len(every)),
        "score_max": max(one.largest for one in logits),
        "active": sum(one.active for one in every) / len(every),
    }
    widths = [one.epsilon for one in every if one.epsilon is not None]
    return found | ({"epsilon": sum(widths) / len(widths)} if widths else {})


def spacing_mass(layer: LayerTrace, view: LogitView) -> float:
    """P(Δ <= q): share of tokens within one bf16 spacing at their threshold (Def. 2.1).

    q is passed on to the units of the score where these are not the logits.
    """
    assert view.logits is not None
    at = layer.facts.k - 1
    step = grid_step(view.logits[:, at : at + 1], FORMAT)[:, 0] * view.slope[:, at]
    gaps = view.scores[:, at] - view.scores[:, at + 1]
    one = torch.ones(1, dtype=torch.float64)
    return boundary_mass(gaps / step.clamp(min=TINY), one).mass[0]


def _rounding(layer: LayerTrace) -> dict[str, float]:
    """What bf16 would do to the choice of these tokens; nothing where that is unknown."""
    check_finite(layer)
    if scored(layer) != "ok":
        return {}
    view = logit_view(layer)
    if view.logits is None:
        return {}
    record, _ = precision_flips(layer, view, FORMAT)
    found = {
        "near_bf16": spacing_mass(layer, view),
        "tie_bf16": record.tie_emulated.value,
        "flip_bf16": record.flip_emulated.value,
        "expected": record.flip.value,
    }
    return {name: value for name, value in found.items() if value is not None}


def _gap_scalars(every: Sequence[LayerScalars]) -> dict[str, float]:
    known = [one for one in every if one.gaps is not None]
    if not known or len({one.units for one in known}) > 1:
        return {}
    gaps = torch.cat([one.gaps for one in known if one.gaps is not None])
    values = quantile_bands(gaps, tuple(LEVELS.values())).value.tolist()
    ties = (gaps == 0).double().mean().item()
    return {**dict(zip(LEVELS, values, strict=True)), "ties": ties}


def _mean(values: Sequence[float], tokens: Float[Tensor, " calls"]) -> float:
    """Mean over calls, weighted by their tokens."""
    column = torch.tensor(values, dtype=torch.float64)
    return ((column * tokens).sum() / tokens.sum()).item()
