"""What a rate study will do: sample sizes, repetitions and starts of one setting, in blocks.

The plan has a key made of everything that its results depend on, by which they are found again. A
repetition is drawn from a seed of its own, so that it is the same in whatever block it is fitted.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from tieline.errors import require
from tieline.estimation.design import LawName, repetition_seeds
from tieline.estimation.fit import METHODS, Method, ModelRegression
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters
from tieline.estimation.problem import LeastSquares
from tieline.estimation.starts import lift
from tieline.trace.jsonio import canonical

__all__ = ["SIZES", "Block", "RatePlan", "estimate_seconds", "plan_blocks"]

SIZES = (1000, 3162, 10_000, 31_623)
MOST_ENTRIES = 6_400_000
"""Samples times parameters of a block, so that a killed run loses seconds."""
USUAL_STEPS = {"relu": 25, "two_layer": 25}
OTHER_STEPS = 12


@dataclass(frozen=True, eq=False)
class RatePlan:
    """A setting with the grid on which it is studied.

    Attributes:
        name: of the setting.
        model: the family that is fitted.
        source: the family that the data come from.
        truth: the parameters that they come from.
        reference: what the fits are compared with, in the model's family: the truth, or Ḡ where
            the model does not contain it.
        noise: standard deviation.
        law: of the inputs.
        loss: name of the Voronoi loss.
        paper: whose loss it is, 2 or 4.
        power: r of the losses that have one.
        sizes: sample sizes.
        repetitions: data sets for each size.
        radii: start radii.
        shrink: whether starts shrink like n^-1/2, from their radius at n = 1000.
        starts: starts for each data set, of which the best counts.
        method: of fitting.
        iterations: steps that Levenberg-Marquardt may try.
        seed: of everything drawn.
    """

    name: str
    model: MoEModel
    source: MoEModel
    truth: MoEParameters
    reference: MoEParameters
    noise: float = 0.1
    law: LawName = "uniform"
    loss: str = "L3"
    paper: int = 2
    power: int = 1
    sizes: tuple[int, ...] = SIZES
    repetitions: int = 16
    radii: tuple[float, ...] = (0.1,)
    shrink: bool = False
    starts: int = 1
    method: Method = "lm"
    iterations: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = list(self.sizes)
        good = bool(sizes) and sizes == sorted(set(sizes)) and sizes[0] >= 1
        require(good, f"sample sizes grow from 1 on, got {sizes}")
        require(self.repetitions >= 2, f"need repetitions >= 2, got {self.repetitions}")
        require(self.starts >= 1, f"need starts >= 1, got {self.starts}")
        radii = list(self.radii)
        right = bool(radii) and min(radii) >= 0 and len(set(radii)) == len(radii)
        require(right, f"start radii are different and not negative, got {radii}")
        require(self.method in METHODS, f"method must be one of {METHODS}, got {self.method!r}")
        self.source.check(self.truth)

    @property
    def centre(self) -> MoEParameters:
        """The reference with as many atoms as the model has, near which fits start."""
        return lift(self.model, self.reference)

    @property
    def key(self) -> str:
        """Sixteen digits of a SHA-256 over all that a repetition depends on."""
        named = ("name", "noise", "law", "loss", "paper", "power", "shrink", "starts", "method")
        facts = {name: getattr(self, name) for name in (*named, "iterations", "seed")}
        for name in ("model", "source"):
            facts[name] = {k: _plain(v) for k, v in asdict(getattr(self, name)).items()}
        for name in ("truth", "reference"):
            facts[name] = getattr(self, name).flatten().tolist()
        return hashlib.sha256(canonical(facts).encode()).hexdigest()[:16]


class Block(NamedTuple):
    """Repetitions that are fitted together."""

    n: int
    radius: float
    repetitions: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Samples."""
        return self.n * len(self.repetitions)

    def seeds(self, plan: RatePlan) -> list[int]:
        """The seed of each repetition; starts of all radii see the same data."""
        every = repetition_seeds(plan.seed, self.n, plan.repetitions)
        return [every[repetition] for repetition in self.repetitions]


def plan_blocks(
    plan: RatePlan, done: Sequence[tuple[int, float, int]] = (), most: int = MOST_ENTRIES
) -> list[Block]:
    """Blocks of what is not done yet, as (n, radius, repetition); the largest first."""
    known = set(done)
    blocks = []
    for n in plan.sizes:
        for radius in plan.radii:
            todo = [r for r in range(plan.repetitions) if (n, radius, r) not in known]
            size = max(1, most // (n * plan.model.n_parameters))
            parts = [todo[at : at + size] for at in range(0, len(todo), size)]
            blocks += [Block(n, radius, tuple(part)) for part in parts]
    return sorted(blocks, key=lambda block: -block.rows)


def estimate_seconds(plan: RatePlan, blocks: Sequence[Block], jobs: int) -> float:
    """About how long the blocks take: a pass over a few samples, times the usual steps.

    A fit takes about a dozen steps, twice that with kinks; an estimate within a factor of three.
    """
    if not blocks:
        return 0.0
    n = min(4096, max(block.n for block in blocks))
    sample = plan.source.simulate(plan.truth, n, [plan.seed], noise=plan.noise, law=plan.law)
    problem = LeastSquares(ModelRegression(plan.model), sample.x, sample.y)
    theta = plan.centre.flatten()[None]
    which = torch.zeros(1, dtype=torch.int64)
    problem.normal(theta, which)
    begun = time.perf_counter()
    problem.normal(theta, which)
    per_row = (time.perf_counter() - begun) / n
    steps = USUAL_STEPS.get(plan.model.expert, OTHER_STEPS)
    fits = sum(len(block.repetitions) for block in blocks) * plan.starts
    solving = 1e-10 * plan.model.n_parameters**3 * steps * fits
    rows = sum(block.rows for block in blocks) * plan.starts
    return (per_row * rows * steps + solving) / max(1, min(jobs, len(blocks)))


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
