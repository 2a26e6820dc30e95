"""Numerical tools that several rooms share.

log_grid         points at equal ratios
float_step       distance between the neighbours of a number in a floating-point format
round_to_step    nearest multiple of a step, halves to even
one_thread       torch on one thread, for loops of small operations
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import require

__all__ = ["float_step", "log_grid", "one_thread", "round_to_step"]


def log_grid(low: float, high: float, per_decade: int) -> Float[Tensor, " points"]:
    """Return points from `low` to `high` at equal ratios, both ends exact, in float64."""
    require(0 < low < high and per_decade > 0, f"need 0 < low < high, got {low=}, {high=}")
    n = max(1, round(per_decade * math.log10(high / low)))
    grid = torch.logspace(math.log10(low), math.log10(high), n + 1, dtype=torch.float64)
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
