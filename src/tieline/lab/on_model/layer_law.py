r"""The continuity law of docs/continuity.md in the layers of a model: predicted and measured.

    f      half of the density of the gap at 0
    J²     mean ‖y_swapped - y‖² at a tie, the experts of ranks k and k + 1 swapped
    a      relative slope of f J² with the gap
    σ      noise of the gap under a precision
    D      mean ‖y_ε - y‖²                y the layer's output, y_ε that of projected top-k
    S      mean ‖y_ε(c + n) - y_ε(c)‖²    n normal noise of the ranked scores, σ/√2 for each

D and S are over all tokens, inputs those of the clean original, and in units of mean ‖y‖². The
noise acts on the choice alone: weights follow from the clean scores, so that S has no part that a
gate could not change. Predictions (`projected_cost`, f J² ε/6 (1 + aε/4) for D) come from the
calibration text, D and S from other text. f J² and its slope are fitted by a straight line to the
jumps of the fifth of the tokens nearest to a tie: jumps are heavy-tailed, and the few tokens inside
a narrow band would give a noisier estimate.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.analysis.smooth import SCALES, SmoothingCalibration
from tieline.core.statistics import Estimate, SequenceSums
from tieline.lab.limits.continuity_cost import hard_sensitivity, least_moved, projected_cost
from tieline.lab.on_model.subject import Progress
from tieline.measure.boundary import gap_density
from tieline.models.routed_block import Block, BlockCall, Rows, block_of
from tieline.models.router_output import Choice, read_output
from tieline.models.router_rule import at_least_float32, column_weights, selection_scores
from tieline.models.smoothed_router import LayerPlan, gate_groups
from tieline.routing.gates import Groups
from tieline.routing.smooth_gates import projected_columns
from tieline.run.condition import noise_generator
from tieline.run.forward import forward

JACKKNIFE_GROUPS = 16
"""Groups of sequences that the jackknife leaves out in turn."""

NEAR_SHARE = 0.2
"""Share of tokens, those with the smallest gaps, from which f J² and its slope are fitted."""

NOISE_CUTOFF = 6.0
"""Standard deviations beyond the band at which noise is neglected."""

HARD_EPSILON = 1e-9
"""ε that stands for top-k, relative to the range of the scores."""

Ids = Int[Tensor, "_ _"]
Squares = Float[Tensor, " tokens"]


@dataclass(frozen=True)
class LawPoint:
    """One layer at one band width; squares are in units of the output's mean square.

    Attributes:
        scale: c = ε/σ.
        epsilon: ε.
        inside: share of tokens whose gap is below ε.
        moved: D, the mean square change of the layer's output by smoothing.
        predicted_moved: D predicted from density, jump, their slope and ε.
        sensitivity: S, the mean square change of the output under noise of the choice.
        predicted_sensitivity: S predicted from density, jump, their slope, σ and ε.
        factor: S of top-k over S.
        over: D over the least D of any continuous gate for that factor, at finite σ.
    """

    scale: float
    epsilon: float
    inside: float
    moved: Estimate
    predicted_moved: float
    sensitivity: Estimate
    predicted_sensitivity: float
    factor: float | None
    over: Estimate


@dataclass(frozen=True)
class LayerLaw:
    """The law in one layer, predicted and measured.

    Attributes:
        name: name of the router.
        density: f of the signed margin at 0, from the calibration text.
        jump: J over the root mean square of the output, from the calibration text.
        sigma: noise of the margin.
        slope: relative slope of f J² with the gap, from the calibration text.
        hard: S of top-k.
        predicted_hard: S of top-k predicted from density, jump and σ.
        points: one per width.
    """

    name: str
    density: float
    jump: float
    sigma: float
    slope: float
    hard: Estimate
    predicted_hard: float
    points: tuple[LawPoint, ...]


class _SubjectCall(NamedTuple):
    """One call of a layer: inputs of its block, logits and selection scores of its router."""

    plan: LayerPlan
    block: Block
    rows: Rows
    logits: Float[Tensor, "tokens experts"]
    scores: Float[Tensor, "tokens experts"]
    groups: Groups | None

    def output(self, width: float, noise: Tensor | float = 0.0) -> Float[Tensor, "tokens dim"]:
        """Return the output by projected top-k of a width, with noise on the ranked scores."""
        scores = self.scores.double() + noise
        columns = projected_columns(scores, self.plan.k, epsilon=width, groups=self.groups)
        plan, ids = self.plan, columns.ids
        weights = column_weights(plan.family, plan.router, self.logits, ids, columns.share)
        return self.block.run(self.rows, Choice(weights, ids)).double()

    def at_tokens(self, tokens: Int[Tensor, " some"]) -> "_SubjectCall":
        """Return the call restricted to some tokens."""
        logits, scores = self.logits[tokens], self.scores[tokens]
        return self._replace(rows=self.rows.at_tokens(tokens), logits=logits, scores=scores)

    @property
    def hard_width(self) -> float:
        """An ε too small to distinguish from top-k."""
        return HARD_EPSILON * (self.scores.amax() - self.scores.amin()).item() + 1e-30

    @property
    def gaps(self) -> Squares:
        """Gap of each token: k-th minus (k+1)-th ranked score, within the chosen groups."""
        narrow = projected_columns(
            self.scores.double(), self.plan.k + 1, epsilon=self.hard_width, groups=self.groups
        )
        last = self.scores.double().gather(1, narrow.ids[:, : self.plan.k + 1])
        return last[:, self.plan.k - 1] - last[:, self.plan.k]


def _layer_calls(model: nn.Module, plans: Sequence[LayerPlan], ids: Ids) -> list[_SubjectCall]:
    """Run a batch and return the calls of its layers."""
    calls: list[_SubjectCall] = []
    state: dict[str, Any] = {}

    def record_routing(
        plan: LayerPlan, router: nn.Module, args: Any, keywords: dict[str, Any], output: Any
    ) -> None:
        routed = read_output(plan.family, router, (args, keywords), output)
        chosen = selection_scores(plan.family, router, routed.logits, (args, keywords))
        scores, groups = at_least_float32(chosen.scores), gate_groups(chosen.limit)
        state[plan.name] = routed.logits.clone(), scores.clone(), groups

    def record_block(
        plan: LayerPlan, block: Block, module: nn.Module, args: Any, keywords: Any, output: Any
    ) -> None:
        call = BlockCall(args, keywords, output)
        calls.append(
            _SubjectCall(plan, block, call.rows(torch.arange(call.tokens)), *state[plan.name])
        )

    with ExitStack() as stack:
        for plan in plans:
            block = block_of(model, plan.name)
            for module, hook in (
                (plan.router, partial(record_routing, plan)),
                (block.module, partial(record_block, plan, block)),
            ):
                handle = module.register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
        forward(model, ids)
    return calls


class _TieQuantities(NamedTuple):
    """f, J², σ and the slope of f J² in a layer, from the calibration text."""

    density: float
    jump_square: float
    sigma: float
    slope: float

    @property
    def arguments(self) -> tuple[float, float, float]:
        """(f, J, σ), the arguments of the functions of `limits.continuity_cost`."""
        return self.density, math.sqrt(self.jump_square), self.sigma


def _measure_tie(calls: Sequence[_SubjectCall], sigma: float) -> tuple[_TieQuantities, float]:
    """Return the tie quantities of a layer, and the width below which tokens count as near."""
    gaps = torch.cat([call.gaps for call in calls])
    width = gaps.quantile(NEAR_SHARE).item()
    lines = torch.cat([_weighted_jumps(call, width) for call in calls]).mean(dim=0)
    size = (
        torch.cat([call.rows.output.double().square().sum(dim=1) for call in calls]).mean().item()
    )
    weighted, rise = lines.clamp_min(0.0)[0].item(), lines[1].item()
    density = (gap_density(gaps).value or 0.0) / 2
    slope = rise / weighted if weighted > 0 else 0.0
    return _TieQuantities(density, weighted / size / max(density, 1e-30), sigma, slope), width


def _weighted_jumps(call: _SubjectCall, width: float) -> Float[Tensor, "tokens 2"]:
    """Return two numbers per token whose means are f J² at the tie and its slope with the gap."""
    gaps = call.gaps
    near = (gaps < width).nonzero().squeeze(1)
    weighted = line_weights(gaps[near], width) * _jump_squares(call, near).unsqueeze(1)
    return torch.zeros(len(gaps), 2, dtype=torch.float64).index_copy(0, near, weighted)


def line_weights(gaps: Squares, width: float) -> Float[Tensor, "tokens 2"]:
    """Return (4 - 6u) / 2w and (12u - 6) / 2w², u = gap/w, the weights of gaps below the width w.

    Their sums over tokens, divided by the number of all tokens, are the value at the tie and the
    slope of the least-squares line through the density of the signed margin.
    """
    u = gaps / width
    return torch.stack(((4 - 6 * u) / (2 * width), (12 * u - 6) / (2 * width**2)), dim=1)


def _jump_squares(call: _SubjectCall, tokens: Int[Tensor, " near"]) -> Squares:
    """Return ‖y_swapped - y‖² of some tokens, with weights from the clean scores."""
    calls = call.at_tokens(tokens)
    k, plan = call.plan.k, call.plan
    ranked = projected_columns(
        calls.scores.double(), k + 1, epsilon=call.hard_width, groups=call.groups
    ).ids[:, : k + 1]
    sides = []
    for left_out in (k, k - 1):
        ids = ranked[:, [rank for rank in range(k + 1) if rank != left_out]]
        share = torch.ones_like(ids, dtype=torch.float64)
        weights = column_weights(plan.family, plan.router, calls.logits, ids, share)
        sides.append(calls.block.run(calls.rows, Choice(weights, ids)).double())
    return (sides[0] - sides[1]).square().sum(dim=1)


@dataclass
class _LawSums:
    """Sums over the tokens of a layer; `jumps` uses tokens with gaps below `width`."""

    width: float
    size: SequenceSums = field(default_factory=SequenceSums)
    jumps: SequenceSums = field(default_factory=SequenceSums)
    hard: SequenceSums = field(default_factory=SequenceSums)
    inside: dict[float, SequenceSums] = field(default_factory=lambda: defaultdict(SequenceSums))
    moved: dict[float, SequenceSums] = field(default_factory=lambda: defaultdict(SequenceSums))
    sensitivity: dict[float, SequenceSums] = field(
        default_factory=lambda: defaultdict(SequenceSums)
    )


def layer_laws(
    model: nn.Module,
    widths: SmoothingCalibration,
    calibration: Sequence[Ids],
    batches: Sequence[Ids],
    *,
    scales: Sequence[float] = SCALES,
    draws: int = 2,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[LayerLaw, ...]:
    """Measure D and S of projected top-k in every layer by itself, and predict them by the law.

    Args:
        model: the original, in evaluation mode and float32.
        widths: scores and noise of the model.
        calibration: tokens from which f and J are measured.
        batches: other tokens, on which D and S are measured.
        scales: c = ε/σ.
        draws: number of noise draws.
        seed: seed of the noise.
        progress: called with stage, done and total.
    """
    plans = [plan for plan in widths.plans if widths.sigmas[plan.name] > 0]
    calibration_calls = [_layer_calls(model, plans, ids) for ids in calibration]
    ties, sums = {}, {}
    for index, plan in enumerate(plans):
        tie, width = _measure_tie(
            [calls[index] for calls in calibration_calls], widths.sigmas[plan.name]
        )
        ties[plan.name], sums[plan.name] = tie, _LawSums(width)
    del calibration_calls
    for number, ids in enumerate(batches):
        for index, call in enumerate(_layer_calls(model, plans, ids)):
            name, shape = call.plan.name, tuple(ids.shape)
            source = noise_generator(seed, number, index)
            _add_batch_sums(call, sums[name], ties[name].sigma, (scales, draws), source, shape)
        if progress is not None:
            progress("law", number + 1, len(batches))
    return tuple(_layer_law(name, ties[name], sums[name], scales) for name in ties)


def _add_batch_sums(
    call: _SubjectCall,
    sums: _LawSums,
    sigma: float,
    scales_and_draws: tuple[Sequence[float], int],
    source: torch.Generator,
    shape: tuple[int, ...],
) -> None:
    """Add the tokens of a batch; tokens too far from any band for the noise count as zero."""
    scales, draws = scales_and_draws
    gaps = call.gaps
    near = (gaps < (max(scales) + NOISE_CUTOFF) * sigma).nonzero().squeeze(1)
    near_calls = call.at_tokens(near)
    hard = near_calls.output(call.hard_width)
    size = (*near_calls.scores.shape, draws)
    noises = torch.randn(size, generator=source, dtype=torch.float64) * sigma / math.sqrt(2)

    def add(sums: SequenceSums, squares: Squares) -> None:
        sums.add(torch.zeros_like(gaps).index_copy(0, near, squares).view(shape))

    sums.size.add(call.rows.output.double().square().sum(dim=1).view(shape))
    sums.jumps.add(_weighted_jumps(call, sums.width)[:, 0].view(shape))
    add(sums.hard, _noise_change(near_calls, call.hard_width, hard, noises))
    for scale in scales:
        smooth = near_calls.output(scale * sigma)
        add(sums.moved[scale], (smooth - hard).square().sum(dim=1))
        add(sums.sensitivity[scale], _noise_change(near_calls, scale * sigma, smooth, noises))
        add(sums.inside[scale], (gaps[near] < scale * sigma).double())


def _noise_change(call: _SubjectCall, width: float, clean: Tensor, noises: Tensor) -> Squares:
    """Return the mean over draws of ‖y(c + n) - y(c)‖²."""
    changes = [
        (call.output(width, noise) - clean).square().sum(dim=1) for noise in noises.unbind(dim=-1)
    ]
    return torch.stack(changes).mean(dim=0)


def _layer_law(name: str, tie: _TieQuantities, sums: _LawSums, scales: Sequence[float]) -> LayerLaw:
    """Return the law of one layer at all widths, from its sums over batches."""
    size = sums.size.mean().value or 1.0
    hard = sums.hard.mean().times(1 / size)
    points = tuple(_law_point(tie, sums, scale, size, hard.value or 0.0) for scale in scales)
    predicted = hard_sensitivity(*tie.arguments)
    return LayerLaw(name, *tie.arguments, tie.slope, hard, predicted, points)


def _law_point(
    tie: _TieQuantities, sums: _LawSums, scale: float, size: float, hard: float
) -> LawPoint:
    """Return measured and predicted D and S at one width."""
    moved, sensitivity = (
        sums_by_scale[scale].mean().times(1 / size)
        for sums_by_scale in (sums.moved, sums.sensitivity)
    )
    width = scale * tie.sigma
    cost = projected_cost(*tie.arguments, width, tie.slope)
    return LawPoint(
        scale,
        width,
        sums.inside[scale].mean().value or 0.0,
        moved,
        cost.moved,
        sensitivity,
        cost.sensitivity,
        hard / sensitivity.value if sensitivity.value else None,
        _frontier_ratio(sums, scale, tie.sigma),
    )


def _frontier_ratio(sums: _LawSums, scale: float, sigma: float) -> Estimate:
    """Return D over the least D for this S, with a jackknife error over groups of sequences.

    S_hard is f J² σ √(2/π) with f J² of the same text, which far more tokens determine than the
    few that flip.
    """
    columns = (sums.moved[scale], sums.sensitivity[scale], sums.jumps)
    columns_sum = torch.stack([torch.cat(sums.sums) for sums in columns])
    ratio = _ratio_to_least(columns_sum.sum(dim=1), sigma)
    groups = torch.arange(columns_sum.shape[1]) % min(JACKKNIFE_GROUPS, columns_sum.shape[1])
    count = int(groups.max()) + 1
    if ratio is None or count < 2:
        return Estimate(ratio, None, "ok" if ratio is not None else "not answerable: no flips seen")
    left_out = [
        _ratio_to_least(columns_sum[:, groups != group].sum(dim=1), sigma) for group in range(count)
    ]
    ratios = torch.tensor([value for value in left_out if value is not None], dtype=torch.float64)
    if len(ratios) < count:  # too few sequences for an error
        return Estimate(ratio, None)
    return Estimate(ratio, ((count - 1) * ratios.var(correction=0)).sqrt().item())


def _ratio_to_least(sums: Float[Tensor, "3"], sigma: float) -> float | None:
    """Return D / (least_moved(S_hard / S) S_hard); None unless 0 < S < S_hard."""
    moved, remaining, jumps = sums.tolist()
    hard = hard_sensitivity(max(jumps, 0.0), 1.0, sigma)
    if not 0 < remaining < hard:
        return None
    return moved / (least_moved(hard / remaining) * hard)
