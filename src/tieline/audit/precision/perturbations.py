"""The perturbations of an audit: what is done, to which part of the model, how strongly.

kind           level        router                          model
rounding       a format     the routers in the format       the whole model in it
score noise    σ            N(0, σ²) on the logits          -
state noise    ρ            ρ · rms(x) on router inputs     on what every routed layer hands on
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tieline.errors import require
from tieline.hf.formats import FORMATS, format_named
from tieline.hf.noise_hooks import score_noise, state_noise
from tieline.hf.rounding_hooks import emulate

__all__ = ["Perturbation", "applied", "noise_generator", "standard_perturbations"]

Kind = Literal["rounding", "score noise", "state noise"]
Part = Literal["router", "model"]

SIGMAS = (0.001, 0.01, 0.1)
RATIOS = (0.001, 0.01)


@dataclass(frozen=True)
class Perturbation:
    """One thing to do to the model.

    Attributes:
        kind: rounding or noise, and of what.
        level: name of the format, σ of the logits' noise, or ρ of the states'.
        part: "router" for the routing path alone, "model" for everything.
    """

    kind: Kind
    level: str | float
    part: Part = "router"

    def __post_init__(self) -> None:
        if self.kind == "rounding":
            format_named(str(self.level))
        else:
            size = self.level if isinstance(self.level, float) else -1.0
            require(0 < size < float("inf"), f"{self.kind} needs a level > 0, got {self.level!r}")
        alone = f"{self.kind} is of the routers alone, got part={self.part!r}"
        require(self.kind != "score noise" or self.part == "router", alone)

    @property
    def name(self) -> str:
        """Name for tables: "router bf16", "score noise 0.01", "model state noise 0.01"."""
        if self.kind == "rounding":
            return f"{self.part} {self.level}"
        words = f"{self.kind} {self.level:g}"
        return words if self.kind == "score noise" else f"{self.part} {words}"

    @property
    def at_router(self) -> "Perturbation":
        """The same of a router alone: what one layer does by itself on clean inputs."""
        return Perturbation(self.kind, self.level)


def standard_perturbations(
    formats: Sequence[str] = tuple(FORMATS),
    sigmas: Sequence[float] = SIGMAS,
    ratios: Sequence[float] = RATIOS,
) -> tuple[Perturbation, ...]:
    """Every format and noise, of the routers first and then of the model."""
    router = [Perturbation("rounding", name) for name in formats]
    scores = [Perturbation("score noise", sigma) for sigma in sigmas]
    states = [Perturbation("state noise", ratio) for ratio in ratios]
    model = [Perturbation("rounding", name, "model") for name in formats]
    noisy = [Perturbation("state noise", ratio, "model") for ratio in ratios]
    return (*router, *scores, *states, *model, *noisy)


def applied(
    model: nn.Module,
    perturbation: Perturbation,
    generator: torch.Generator,
    keep: Collection[str] = (),
) -> AbstractContextManager[None]:
    """A block in which `model`, or a single router, is perturbed.

    Args:
        model: a model of transformers, or one of its routers for a perturbation of routers.
        perturbation: what to do.
        generator: where noise comes from.
        keep: routers that rounding spares.
    """
    level, part = perturbation.level, perturbation.part
    if perturbation.kind == "rounding":
        return emulate(model, str(level), "router" if part == "router" else "all", keep)
    if perturbation.kind == "score noise":
        return score_noise(model, float(level), generator)
    return state_noise(model, float(level), generator, "router" if part == "router" else "all")


def noise_generator(seed: int, *places: int) -> torch.Generator:
    """A source of noise for one place of the audit, the same whenever that place is visited."""
    mixed = seed
    for place in places:
        mixed = (mixed * 1_000_003 + place + 1) % (1 << 62)
    return torch.Generator().manual_seed(mixed)
