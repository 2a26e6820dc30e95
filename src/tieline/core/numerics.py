"""Numerical tools that several rooms share.

log_grid           points at equal ratios
PRECISIONS         number formats by name                                       Def. 7.1
float_step         distance between the neighbours of a number in a floating-point format
grid_step          the same in a named format: q                                Def. 7.1
round_to_step      nearest multiple of a step, halves to even
round_to           nearest number of a named format                             Def. 7.1
one_thread         torch on one thread, for loops of small operations
normal_cdf         Φ(z) of the standard normal distribution
solve_increasing   x > 0 at which an increasing function reaches a target
is_recomputing     whether activation checkpointing repeats a forward pass

Floating-point formats round the scores as they are and saturate at their largest number; integer
formats are symmetric with one scale per token, which maps the largest |score| to the largest
integer (127 or 7).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import require

Scores = Float[Tensor, "tokens experts"]

SOLVER_STEPS, SOLVER_TOLERANCE = 24, 1e-3
SOLVER_LARGEST = 1e6


@dataclass(frozen=True)
class FloatGrid:
    """A floating-point format: b stored mantissa bits, smallest normal exponent, largest number."""

    mantissa_bits: int
    min_exponent: int
    largest: float


@dataclass(frozen=True)
class IntegerGrid:
    """A symmetric integer format with levels -levels, ..., levels and one scale per token."""

    levels: int


PRECISIONS: dict[str, FloatGrid | IntegerGrid] = {
    "bf16": FloatGrid(7, -126, (2 - 2**-7) * 2.0**127),
    "fp16": FloatGrid(10, -14, 65504.0),
    "fp8_e4m3": FloatGrid(3, -6, 448.0),
    "fp8_e5m2": FloatGrid(2, -14, 57344.0),
    "int8": IntegerGrid(127),
    "int4": IntegerGrid(7),
}
"""The formats by name, with e4m3 in its finite-only form."""


def log_grid(low: float, high: float, per_decade: int) -> Float[Tensor, " points"]:
    """Return points from `low` to `high` at equal ratios, both ends exact, in float64."""
    require(0 < low < high and per_decade > 0, f"need 0 < low < high, got {low=}, {high=}")
    n = max(1, round(per_decade * math.log10(high / low)))
    grid = torch.logspace(
        math.log10(low), math.log10(high), n + 1, dtype=torch.float64, device="cpu"
    )
    grid[0], grid[-1] = low, high
    return grid


def float_step(
    values: Float[Tensor, "*shape"], mantissa_bits: int, min_exponent: int
) -> Float[Tensor, "*shape"]:
    """Step 2^(max(floor(log2|x|), e_min) - b) of a format with b stored bits, in float64.

    Exact: the exponent is read from the number, not from a logarithm. Below 2^e_min the format is
    subnormal and its step constant.
    """
    exponent = torch.frexp(values.double()).exponent - 1
    exponent = exponent.masked_fill(values == 0, min_exponent).clamp(min=min_exponent)
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - mantissa_bits)


def round_to_step(
    values: Float[Tensor, "*shape"], step: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Round each value to the nearest multiple of `step`, halves to the even one, in float64."""
    return (values.double() / step).round() * step


def grid_step(scores: Scores, precision: str) -> Scores:
    """q: distance between the neighbours of each score in the format, in float64 (Def. 7.1).

    Args:
        scores: (T, E) logits; -inf for ranks without expert. The scale of integer formats is taken
            from the finite ones of a token: a truncated list gives too small a step where the
            largest |logit| is among the missing ranks.
        precision: a name in `PRECISIONS`.
    """
    grid = _number_grid(precision)
    z = scores.double()
    if isinstance(grid, FloatGrid):
        finite = z.nan_to_num(neginf=0.0).clamp(-grid.largest, grid.largest)
        return float_step(finite, grid.mantissa_bits, grid.min_exponent)
    largest = z.abs().masked_fill(z.isinf(), 0.0).amax(dim=-1, keepdim=True)
    return (largest / grid.levels).expand_as(z)


def _number_grid(precision: str) -> FloatGrid | IntegerGrid:
    """The format of a name in `PRECISIONS`."""
    require(
        precision in PRECISIONS, f"unknown precision {precision!r}: one of {', '.join(PRECISIONS)}"
    )
    return PRECISIONS[precision]


def round_to(scores: Scores, precision: str) -> Scores:
    """Nearest number of the format, halves to even, in float64 (Def. 7.1).

    Floating-point formats saturate at their largest number; -inf stays.
    """
    grid = _number_grid(precision)
    step = grid_step(scores, precision)
    # a step of zero belongs to a token whose scores are all zero
    rounded = round_to_step(scores, step.where(step > 0, 1.0))
    if isinstance(grid, FloatGrid):
        rounded = rounded.clamp(-grid.largest, grid.largest)
    return torch.where(scores.isneginf(), scores.double(), rounded)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside the block.

    In loops of small operations, synchronising threads costs more than it gains: the quadrature of
    `geometry.flips` ran ten times slower with two threads on a busy machine of two cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_recomputing() -> bool:
    """True inside the autograd engine, which is where checkpointed forwards are repeated.

    Whatever counts, sums or records tokens must count them once and stay silent in the repetition.
    The engine numbers the graph task that a thread works on and reports -1 outside of any; this
    holds for both kinds of checkpointing and for the engine's own device threads.
    """
    return torch._C._current_graph_task_id() != -1


def normal_cdf(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Standard normal distribution function Φ(z), accurate in the lower tail."""
    return torch.special.erfc(-z / math.sqrt(2)) / 2


def solve_increasing(
    rate: Callable[[float], float], target: float, start: float = 0.01
) -> float | None:
    """Solve rate(x) = target for x > 0 and an increasing rate; None if 10^6 is not enough.

    Brackets the solution by factors of four, then interpolates linearly between logarithms, which
    is exact for a power of x; every third step halves the bracket instead.
    """
    low = high = (start, rate(start))
    while high[1] < target:
        low, high = high, (4 * high[0], rate(4 * high[0]))
        if high[0] > SOLVER_LARGEST:
            return None
    while low[1] >= target:
        low, high = (low[0] / 4, rate(low[0] / 4)), low
        if low[0] < 1 / SOLVER_LARGEST:
            return None
    middle = high
    for step in range(SOLVER_STEPS):
        halves = step % 3 == 2 or low[1] <= 0
        fraction = 0.5 if halves else _log_fraction(low[1], high[1], target)
        x = low[0] * (high[0] / low[0]) ** fraction
        middle = (x, rate(x))
        low, high = (middle, high) if middle[1] < target else (low, middle)
        is_close = abs(middle[1] / target - 1) < SOLVER_TOLERANCE
        if is_close or high[0] / low[0] < 1 + SOLVER_TOLERANCE:
            break
    return middle[0]


def _log_fraction(low: float, high: float, target: float) -> float:
    """Return log(target / low) / log(high / low), kept within 0.01 to 0.99."""
    if high <= low:
        return 0.5
    return min(0.99, max(0.01, math.log(target / low) / math.log(high / low)))
