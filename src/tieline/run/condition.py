r"""How a model runs: rounded, noisy, smoothed, or with the choice of another pass.

    with applied(model, Condition(Perturbation("rounding", "bf16"))):
        model(input_ids=ids)

A condition is a composition in a fixed order:

    weights       weights rounded to a format                       once for many passes
    router        routers smoothed as a record says                 while a pass runs
    computation   products rounded, noise added                     while a pass runs
    choice        experts of the reference pass, forced or replayed while a pass runs

kind           level        router                          model
rounding       a format     the routers in the format       the whole model in it
score noise    σ            N(0, σ²) on the logits          -
state noise    ρ            ρ · rms(x) on router inputs     on what every routed layer hands on

Draws 0 and 1 are two runs under one perturbation. A noise is drawn again. A rounding has nothing
to draw: its second run has noise on the states that it rounds, of the size of the format's errors,
ρ = rms(round(x) - x) for normal x, because other kernels and batches change the last digits that a
format holds, and nothing else.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import nn

from tieline.core.errors import require
from tieline.core.records import canonical_json
from tieline.models.band_width import precision_named
from tieline.models.emulate import (
    Region,
    modular_routers,
    rounded_products,
    rounded_weights,
    score_noise,
    state_noise,
)
from tieline.models.number_formats import FORMATS, OF_ROUTERS, format_named
from tieline.models.smoothed_model import Smoothing, smoothed_routers

Kind = Literal["rounding", "score noise", "state noise"]
Part = Literal["router", "model", "others"]

ChoiceMode = Literal["own", "forced", "live", "recorded"]
"""Whose experts a pass takes.

own         those that its routers choose
forced      those of the reference pass on tokens whose experts differ, with its weights
live        those of the reference pass, weighted by the pass's own routers
recorded    those of the reference pass with its weights
"""

REPLAYS: tuple[ChoiceMode, ...] = ("live", "recorded")

SIGMAS = (0.001, 0.01, 0.1)
RATIOS = (0.001, 0.01)


@dataclass(frozen=True)
class Perturbation:
    """Rounding or noise.

    Attributes:
        kind: rounding or noise, and of what.
        level: name of the format, σ of the logits' noise, or ρ of the states'.
        part: "router" for the routing path alone, "model" for everything, "others" for everything
            but the routing path.
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
        rounds = self.kind == "rounding" or self.part != "others"
        require(rounds, f"{self.kind} is of the router or the model, got part={self.part!r}")

    @property
    def name(self) -> str:
        """Name for tables: "router bf16", "score noise 0.01", "model state noise 0.01"."""
        if self.kind == "rounding":
            return f"{self.part} {self.level}"
        noise = f"{self.kind} {self.level:g}"
        return noise if self.kind == "score noise" else f"{self.part} {noise}"

    @property
    def region(self) -> Region:
        """The same part by its name in `models.emulate`."""
        return "all" if self.part == "model" else self.part

    @property
    def at_router(self) -> "Perturbation":
        """The same perturbation of a router alone, as one layer sees it on clean inputs."""
        return Perturbation(self.kind, self.level)


def standard_perturbations(
    formats: Sequence[str] = tuple(FORMATS),
    sigmas: Sequence[float] = SIGMAS,
    ratios: Sequence[float] = RATIOS,
) -> tuple[Perturbation, ...]:
    """Return every format and noise, of the routers first and then of the model."""
    router = [Perturbation("rounding", name) for name in formats]
    scores = [Perturbation("score noise", sigma) for sigma in sigmas]
    states = [Perturbation("state noise", ratio) for ratio in ratios]
    of_models = [name for name in formats if name not in OF_ROUTERS]
    model = [Perturbation("rounding", name, "model") for name in of_models]
    noisy = [Perturbation("state noise", ratio, "model") for ratio in ratios]
    return (*router, *scores, *states, *model, *noisy)


def noise_generator(seed: int, *numbers: int) -> torch.Generator:
    """Return a generator for one use of noise, the same whenever these numbers are given."""
    mixed = seed
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % (1 << 62)
    return torch.Generator().manual_seed(mixed)


@cache
def rounding_noise(level: str) -> float:
    """ρ = rms(round(x) - x) of normal numbers x, in the activations of a format, or its weights."""
    number_format = format_named(level)
    grid = number_format.activations or number_format.weights
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0), device="cpu")
    return (grid(x) - x).double().square().mean().sqrt().item()


class Rounded(NamedTuple):
    """What is rounded in the weights: format, part of the model, routers that are spared."""

    level: str
    region: Region
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Condition:
    """How a model runs in one pass; the model as it is by default.

    Attributes:
        perturbation: rounding or noise; None for neither.
        kept: names of routers that a rounding leaves in float32.
        smoothing: how routers are smoothed; None to leave them as they are.
        choice: whose experts the pass takes.
        draw: 0 for the first run under the perturbation, 1 for a second, independent one.
        seed: numbers that seed its noise, before the number of the batch.
    """

    perturbation: Perturbation | None = None
    kept: tuple[str, ...] = ()
    smoothing: Smoothing | None = field(default=None, compare=False)
    choice: ChoiceMode = "own"
    draw: int = 0
    seed: tuple[int, ...] = (0,)
    smoothing_key: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        if self.smoothing is not None:
            object.__setattr__(self, "smoothing_key", canonical_json(self.smoothing.to_dict()))

    def taking(self, choice: ChoiceMode) -> "Condition":
        """The same condition with the experts of its reference, forced or replayed."""
        return replace(self, choice=choice)

    def again(self) -> "Condition":
        """A second run under the same perturbation."""
        return replace(self, draw=1)

    def generator(self, batch: int) -> torch.Generator:
        """Return the generator of the noise of one batch."""
        return noise_generator(*self.seed, batch, *([self.draw] if self.draw else []))

    @property
    def rounded(self) -> Rounded | None:
        """What is rounded in the weights; None where they stay as they are."""
        if self.perturbation is None or self.perturbation.kind != "rounding":
            return None
        return Rounded(str(self.perturbation.level), self.perturbation.region, self.kept)

    def weights(self, modules: nn.Module) -> AbstractContextManager[None]:
        """Context in which the weights of these modules that are in memory are rounded."""
        return nullcontext() if self.rounded is None else rounded_weights(modules, *self.rounded)

    @contextmanager
    def computation(
        self,
        model: nn.Module,
        generator: torch.Generator,
        routers: Collection[str] | None = None,
    ) -> Iterator[None]:
        """Context that holds while this thread runs a pass: smoothed routers, products, noise.

        Args:
            model: the model, or one of its routers for a perturbation of routers.
            generator: source of the noise.
            routers: names of the routers whose weights are in memory; by default all.
        """
        with ExitStack() as stack:
            if self.smoothing is not None:
                names = modular_routers(model) if routers is None else routers
                stack.enter_context(smoothed_routers(model, self.smoothing, names))
            for change in self._changes(model, generator):
                stack.enter_context(change)
            yield

    def _changes(
        self, model: nn.Module, generator: torch.Generator
    ) -> list[AbstractContextManager[None]]:
        """Rounding of products or noise, and the noise of a second run after it."""
        if self.perturbation is None:
            return []
        level, region = self.perturbation.level, self.perturbation.region
        if self.perturbation.kind == "score noise":
            return [score_noise(model, float(level), generator)]
        if self.perturbation.kind == "state noise":
            noisy_part = "all" if region == "all" else "router"
            return [state_noise(model, float(level), generator, noisy_part)]
        products = rounded_products(model, str(level), region, self.kept)
        if not self.draw:
            return [products]
        ratio = rounding_noise(str(level))  # before products are rounded
        if region == "all":
            return [products, state_noise(model, ratio, generator, region)]
        routers = modular_routers(model).items()
        noisy = [router for name, router in routers if name not in self.kept]
        return [products, *(state_noise(router, ratio, generator) for router in noisy)]


CLEAN = Condition()
"""The model as it is."""


@contextmanager
def applied(
    model: nn.Module, condition: Condition, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Context in which `model` runs under a condition, whoever calls it.

    Args:
        model: a model of transformers, or one of its routers for a perturbation of routers.
        condition: the condition, with its own choice of experts: those of another pass are given by
            the runner, or by `models.replay`.
        generator: source of the noise; by default that of batch 0.
    """
    require(
        condition.choice == "own",
        f"a {condition.choice} choice needs the reference pass: run it in a plan, or use replay",
    )
    source = condition.generator(0) if generator is None else generator
    with condition.weights(model), condition.computation(model, source):
        yield


def noise_perturbation(name: str) -> Perturbation:
    """Return the perturbation that "bf16", "model bf16" or "router bf16" names."""
    level, region = precision_named(name)
    return Perturbation("rounding", level, "router" if region == "router" else "model")
