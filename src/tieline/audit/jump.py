"""Jump size: how much a layer's output changes when its two tied experts change places.

    jump    ‖y_swapped - y‖ / ‖y‖,    y the output of the layer's block for a token,

y_swapped the output with the expert of rank k + 1 in the place of that of rank k (`audit.swap`).
At a tie this is the height of the discontinuity. Both outputs come from the model's own block, run
again on the inputs that it had; a block whose recorded output is not found again is refused
(Def. 10.2, 10.3).

A flip does harm in proportion to its jump: `GapJumpTable` tells the ties that are near and high.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.audit.blocks import Block
from tieline.audit.records import GapJumpTable, JumpMeasures, JumpSample, LayerJumps
from tieline.audit.samples import BlockSample, BlockSampler
from tieline.audit.swap import recorded_choice, swapped_choice
from tieline.errors import UnsupportedModelError, require
from tieline.geometry.records import Quantiles
from tieline.geometry.sections import scored
from tieline.numerics import mean_estimate, quantile_bands
from tieline.trace.record import LayerTrace, RoutingTrace

__all__ = ["JumpSettings", "gap_jump_table", "measure_jumps", "relative_change"]

PerToken = Float[Tensor, " tokens"]
SAME_OUTPUT = 1e-3
"""Relative difference up to which a block counts as having made its output again."""


@dataclass(frozen=True)
class JumpSettings:
    """How many tokens of each layer are swapped, and how the jumps are sorted.

    Attributes:
        near: number of tokens with the smallest gaps.
        random: number of tokens drawn from the others.
        loss_swaps: number of near tokens whose swap's effect on the loss is measured; 0 for none.
        dangerous_above: jump from which a tie counts as dangerous.
        probabilities: levels of the quantiles of the jump.
        gap_levels: levels of the gap whose quantiles are the rows of the table.
        jump_levels: levels of the jump whose quantiles are its columns.
        seed: of the random sample.
    """

    near: int = 256
    random: int = 256
    loss_swaps: int = 0
    dangerous_above: float = 0.1
    probabilities: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)
    gap_levels: tuple[float, ...] = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
    jump_levels: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.near >= 1, f"need at least one near token, got near={self.near}")
        least = min(self.random, self.loss_swaps, self.seed)
        require(least >= 0, "random, loss_swaps and seed must not be negative")
        for levels in (self.gap_levels, self.jump_levels):
            ends = len(levels) > 1 and levels[0] == 0 and levels[-1] == 1
            require(ends and sorted(levels) == list(levels), f"levels from 0 to 1, got {levels}")


def measure_jumps(
    model: nn.Module,
    trace: RoutingTrace,
    sampler: BlockSampler,
    settings: JumpSettings,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[LayerJumps, ...]:
    """The jumps of every layer, or why there are none.

    Args:
        model: the model, in the mode it was captured in.
        trace: its routing.
        sampler: what watched the same forward passes.
        settings: how many tokens, which levels.
        progress: is told how many layers are done, and of how many.
    """
    done = []
    for layer in trace.layers:
        done.append(_layer_jumps(model, trace, layer, sampler, settings))
        if progress is not None:
            progress(len(done), len(trace.layers))
    return tuple(done)


def _layer_jumps(
    model: nn.Module,
    trace: RoutingTrace,
    layer: LayerTrace,
    sampler: BlockSampler,
    settings: JumpSettings,
) -> LayerJumps:
    status = _answerable(layer, sampler)
    if status != "ok":
        return LayerJumps(layer.name, None, status)
    block, router = sampler.block(layer.name), model.get_submodule(layer.name)
    try:
        samples = [
            _jump_sample(trace, layer, block, router, sample)
            for sample in (sampler.near(layer.name), sampler.random(layer.name))
        ]
    except UnsupportedModelError as problem:
        return LayerJumps(layer.name, None, f"not answerable: {problem}")
    return LayerJumps(layer.name, _measures(layer, block, samples[0], samples[1], settings))


def _answerable(layer: LayerTrace, sampler: BlockSampler) -> str:
    status = scored(layer)
    status = sampler.status(layer.name) if status == "ok" else status
    if status != "ok":
        return status
    if sampler.near(layer.name) is None:
        return "not answerable: no token has an expert that could enter"
    return "ok"


def _jump_sample(
    trace: RoutingTrace,
    layer: LayerTrace,
    block: Block,
    router: nn.Module,
    sample: BlockSample | None,
) -> JumpSample:
    if sample is None:
        return JumpSample((), (), (), (), (), (), ())
    gaps = layer.inner_gap[sample.tokens]
    order = gaps.sort(stable=True).indices
    tokens, rows = sample.tokens[order], sample.rows.take(order)
    plain = block.run(rows, recorded_choice(layer, tokens))
    _check_same(plain, rows.output, block.name)
    swapped = block.run(rows, swapped_choice(layer, tokens, router))
    k = layer.facts.k
    columns = (
        tokens,
        trace.documents[tokens],
        trace.positions[tokens],
        gaps[order],
        relative_change(plain, swapped),
        layer.experts[tokens, k - 1],
        layer.experts[tokens, k],
    )
    return JumpSample(*(tuple(column.tolist()) for column in columns))


def relative_change(
    before: Float[Tensor, "tokens width"], after: Float[Tensor, "tokens width"]
) -> PerToken:
    """‖after - before‖ / ‖before‖ of each row in float64; 0 where nothing changes, 0 / 0 too."""
    change = (after.double() - before.double()).norm(dim=1).cpu()
    size = before.double().norm(dim=1).cpu()
    return torch.where(change == 0, 0.0, change / size)


def _check_same(
    found: Float[Tensor, "tokens width"], recorded: Float[Tensor, "tokens width"], block: str
) -> None:
    """Refuse a block that does not treat tokens one by one, or not twice alike."""
    off = (found.double() - recorded.double()).norm() / recorded.double().norm().clamp(min=1e-30)
    allowed = max(SAME_OUTPUT, 8 * torch.finfo(recorded.dtype).eps)
    require(
        bool(off <= allowed),
        f"the block {block!r} does not reproduce its output on some of its tokens "
        f"(relative difference {off.item():.2g})",
        UnsupportedModelError,
    )


def _measures(
    layer: LayerTrace,
    block: Block,
    near: JumpSample,
    random: JumpSample,
    settings: JumpSettings,
) -> JumpMeasures:
    jumps = torch.tensor(near.jumps, dtype=torch.float64)
    dangerous = (jumps >= settings.dangerous_above).double()
    return JumpMeasures(
        module=block.name,
        near=near,
        random=random,
        near_quantiles=_quantiles(near.jumps, settings),
        random_quantiles=_quantiles(random.jumps, settings) if random.jumps else None,
        dangerous=mean_estimate(dangerous),
        dangerous_above=settings.dangerous_above,
        table=gap_jump_table(layer.inner_gap, near, random, settings),
    )


def _quantiles(values: tuple[float, ...], settings: JumpSettings) -> Quantiles:
    samples = torch.tensor(values, dtype=torch.float64)
    bands = quantile_bands(samples, settings.probabilities)
    return Quantiles(settings.probabilities, *(tuple(column.tolist()) for column in bands))


def gap_jump_table(
    gaps: PerToken, near: JumpSample, random: JumpSample, settings: JumpSettings
) -> GapJumpTable:
    """Joint counts of gap and jump on quantile bins, and the shares of all tokens they stand for.

    Args:
        gaps: of all tokens; infinite ones, which cannot flip, are in no cell.
        near: the tokens of the smallest gaps, which stand for themselves.
        random: a random sample of the others, each standing for as many as were not drawn.
        settings: levels of the bins.
    """
    finite = gaps[gaps.isfinite()]
    sampled = torch.tensor(near.gaps + random.gaps, dtype=torch.float64)
    jumps = torch.tensor(near.jumps + random.jumps, dtype=torch.float64)
    rows = quantile_bands(finite, settings.gap_levels).value
    columns = quantile_bands(jumps, settings.jump_levels).value
    others = (len(finite) - len(near.gaps)) / max(1, len(random.gaps))
    stands_for = torch.cat([torch.ones(len(near.gaps)), torch.full((len(random.gaps),), others)])
    cell = _bin(sampled, rows) * (len(columns) - 1) + _bin(jumps, columns)
    shape = (len(rows) - 1, len(columns) - 1)
    counts = torch.bincount(cell, minlength=math.prod(shape)).view(shape)
    weighted = torch.bincount(cell, stands_for.double(), minlength=math.prod(shape)).view(shape)
    return GapJumpTable(
        gap_levels=settings.gap_levels,
        gap_edges=tuple(rows.tolist()),
        jump_edges=tuple(columns.tolist()),
        counts=tuple(tuple(row) for row in counts.tolist()),
        shares=tuple(tuple(row) for row in (weighted / len(gaps)).tolist()),
    )


def _bin(values: PerToken, edges: Float[Tensor, " edges"]) -> Tensor:
    """Bin of each value: low <= value < high, the last one with its upper edge."""
    return (torch.searchsorted(edges, values, right=True) - 1).clamp(0, len(edges) - 2)
