"""Random designs: inputs, noise and the seeds of repetitions.

    uniform    X ~ Uniform([-1, 1]ᵈ)      P2 section 5.1, P4 eq. 81
    normal     X ~ N(0, I)

Inputs and noise of a repetition come from two streams of its own seed, so that a repetition is the
same whether it is drawn alone or among others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require

__all__ = ["LAWS", "LawName", "Sample", "draw_inputs", "draw_noise", "repetition_seeds"]

LawName = Literal["uniform", "normal"]
LAWS = get_args(LawName)


@dataclass(frozen=True, eq=False)
class Sample:
    """Data of a regression.

    Attributes:
        x: inputs (*repetitions, n, d).
        y: responses (*repetitions, n).
        noise: standard deviation of the noise in y.
    """

    x: Float[Tensor, "*repetitions n d"]
    y: Float[Tensor, "*repetitions n"]
    noise: float


def repetition_seeds(seed: int, n: int, repetitions: int) -> list[int]:
    """Independent seeds of the repetitions 0, 1, … at sample size n."""
    return [
        int(np.random.SeedSequence((seed, n, r)).generate_state(1, np.uint64)[0] >> 1)
        for r in range(repetitions)
    ]


def draw_inputs(
    law: LawName, n: int, d: int, seed: int | Sequence[int]
) -> Float[Tensor, "*repetitions n d"]:
    """Inputs (n, d) of one seed, or (R, n, d) of R seeds."""
    require(law in LAWS, f"law must be one of {LAWS}, got {law!r}")

    def one(generator: torch.Generator) -> Tensor:
        if law == "normal":
            return torch.randn(n, d, dtype=torch.float64, generator=generator)
        return 2 * torch.rand(n, d, dtype=torch.float64, generator=generator) - 1

    return _per_seed(one, seed, stream=0)


def draw_noise(n: int, seed: int | Sequence[int]) -> Float[Tensor, "*repetitions n"]:
    """Standard normal noise (n,) of one seed, or (R, n) of R seeds."""

    def one(generator: torch.Generator) -> Tensor:
        return torch.randn(n, dtype=torch.float64, generator=generator)

    return _per_seed(one, seed, stream=1)


def _per_seed(draw, seed: int | Sequence[int], stream: int) -> Tensor:
    """One draw for a seed, a stack of draws for several."""
    if isinstance(seed, int):
        state = np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)[0]
        return draw(torch.Generator().manual_seed(int(state >> 1)))
    require(len(seed) > 0, "several repetitions need at least one seed, got none")
    return torch.stack([_per_seed(draw, one, stream) for one in seed])
