"""Exponents of power laws, by which rates are tested."""

import math
from collections.abc import Sequence

import torch

from tieline.errors import require
from tieline.studies.claim import Real

__all__ = ["exponent"]


def exponent(x: Sequence[Real], y: Sequence[Real]) -> float:
    """P of |y| ~ x^p by least squares of logarithms."""
    require(len(x) == len(y) > 1, f"a slope needs two points or more, got {len(x)} and {len(y)}")
    a, b = (torch.tensor([math.log(abs(v)) for v in values]).double() for values in (x, y))
    a = a - a.mean()
    return ((a * b).sum() / a.square().sum()).item()
