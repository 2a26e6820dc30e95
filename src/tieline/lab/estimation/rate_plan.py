"""Plans of rate studies: sample sizes, repetitions and starts of one setting, in blocks.

A plan has a key made of everything its results depend on, by which they are found again. A
repetition is drawn from a seed of its own, so it does not depend on the block it is fitted in.
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from tieline.core.errors import require
from tieline.core.records import canonical
from tieline.lab.estimation.fit import METHODS, Method, ModelRegression, lift, population_minimiser
from tieline.lab.estimation.model import LawName, MoEModel, MoEParameters, repetition_seeds
from tieline.lab.estimation.settings import SETTINGS, Setting, well_conditioned
from tieline.lab.estimation.solvers import LeastSquares

SIZES = (1000, 3162, 10_000, 31_623)
MOST_ENTRIES = 6_400_000  # samples times parameters of a block, so that a killed run loses seconds
USUAL_STEPS = {"relu": 25, "two_layer": 25}
OTHER_STEPS = 12  # steps of a fit; kinks double them
POPULATION, POPULATION_STARTS, REFINED = 10_000, 3, 300_000
"""Samples without noise, starts, and samples of the last fit for the population minimiser."""


@dataclass(frozen=True, eq=False)
class RatePlan:
    """A setting with the grid on which it is studied."""

    name: str  # of the setting
    model: MoEModel  # the family that is fitted
    source: MoEModel  # the family that the data come from
    truth: MoEParameters  # the parameters that they come from
    # what the fits are compared with, in the model's family: the truth, or Ḡ where the model
    # does not contain it
    reference: MoEParameters
    noise: float = 0.1  # standard deviation
    law: LawName = "uniform"  # of the inputs
    loss: str = "L3"  # name of the Voronoi loss
    paper: int = 2  # whose loss it is, 2 or 4
    power: int = 1  # r of the losses that have one
    sizes: tuple[int, ...] = SIZES  # sample sizes
    repetitions: int = 16  # data sets for each size
    radii: tuple[float, ...] = (0.1,)  # start radii
    shrink: bool = False  # whether starts shrink like n^-1/2, from their radius at n = 1000
    starts: int = 1  # starts for each data set, of which the best counts
    method: Method = "lm"  # of fitting
    iterations: int = 200  # steps that Levenberg-Marquardt may try
    seed: int = 0  # of everything drawn
    # if not 0, a sample size n is emulated by this many samples with the noise noise ·
    # √(samples/n): what least squares know of a model that contains the truth depends on
    # noise²/n alone, and n may be 1e12
    samples: int = 0

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
        few = 0 <= self.samples <= sizes[0]
        require(few, f"emulate sizes of at least {self.samples} samples, got {sizes[0]}")
        self.source.check(self.truth)

    @property
    def centre(self) -> MoEParameters:
        """The reference with as many atoms as the model has, near which fits start."""
        return lift(self.model, self.reference)

    def drawn(self, n: int) -> tuple[int, float]:
        """Samples that are drawn for the sample size n, and the noise in them."""
        if not self.samples:
            return n, self.noise
        return self.samples, self.noise * math.sqrt(self.samples / n)

    @property
    def key(self) -> str:
        """Sixteen digits of a SHA-256 over all that a repetition depends on."""
        fields = ("name", "noise", "law", "loss", "paper", "power", "shrink", "starts", "method")
        facts = {name: getattr(self, name) for name in (*fields, "iterations", "seed")}
        if self.samples:
            facts["samples"] = self.samples
        for name in ("model", "source"):
            facts[name] = asdict(getattr(self, name))
        for name in ("truth", "reference"):
            facts[name] = getattr(self, name).flatten().tolist()
        return hashlib.sha256(canonical(facts).encode()).hexdigest()[:16]


class RepetitionBlock(NamedTuple):
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
) -> list[RepetitionBlock]:
    """Blocks of what is not done yet, as (n, radius, repetition); the largest first."""
    finished = set(done)
    blocks = []
    for n in plan.sizes:
        for radius in plan.radii:
            todo = [r for r in range(plan.repetitions) if (n, radius, r) not in finished]
            size = max(1, most // (plan.drawn(n)[0] * plan.model.n_parameters))
            groups = [todo[at : at + size] for at in range(0, len(todo), size)]
            blocks += [RepetitionBlock(n, radius, tuple(group)) for group in groups]
    return sorted(blocks, key=lambda block: -block.rows)


def estimate_seconds(plan: RatePlan, blocks: Sequence[RepetitionBlock], jobs: int) -> float:
    """Estimate the time of the blocks within a factor of three, from one timed pass."""
    if not blocks:
        return 0.0
    n = min(4096, max(plan.drawn(block.n)[0] for block in blocks))
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
    rows = sum(plan.drawn(b.n)[0] * len(b.repetitions) for b in blocks) * plan.starts
    return (per_row * rows * steps + solving) / max(1, min(jobs, len(blocks)))


@dataclass(frozen=True, eq=False)
class Case:
    """A plan with the facts of its setting that no fit needs."""

    plan: RatePlan  # what to fit
    paper_slope: float | None = None  # the printed slope, if a paper printed one
    misfit: float = 0.0  # ‖f_Ḡ - q‖; zero where the model contains the truth
    condition: float | None = None  # of the information matrix, if the truth was chosen for it


def as_case(setting: Case | RatePlan | Setting | MoEModel | str, **grid: Any) -> Case:
    """Return the case of a setting, model, plan or name, with these fields of its plan replaced."""
    if isinstance(setting, Case):
        return replace(setting, plan=replace(setting.plan, **grid))
    if isinstance(setting, RatePlan):
        return Case(replace(setting, **grid))
    if isinstance(setting, MoEModel):
        return _case_of_model(setting, **grid)
    return named_case(setting if isinstance(setting, str) else setting.name, **grid)


def named_case(name: str, seed: int = 0, **grid: Any) -> Case:
    """A published setting or a small design `small-GATE-LINK-EXPERT`, by `describe_settings()`.

    `grid` sets fields of `RatePlan`: sizes, repetitions, radii, noise, ...
    """
    if name in SETTINGS:
        return _published(SETTINGS[name], seed, grid)
    fields = name.split("-")
    message = f"unknown setting {name!r}: a published one ({', '.join(SETTINGS)}) or a small design"
    require(len(fields) == 4 and fields[0] == "small", f"{message}, small-GATE-LINK-EXPERT")
    model = _small_model(*fields[1:])
    return _case_of_model(model, name=name, seed=seed, **grid)


def case_of(
    *,
    gate: Any = "linear",
    link: Any = "softmax",
    expert: str = "tanh",
    d: int | None = None,
    n_experts: int | None = None,
    fitted: int | None = None,
    draws: int = 200,
    seed: int = 0,
    **grid: Any,
) -> Case:
    """Any combination, with a truth that is the best conditioned of many draws.

    By default d and n_experts are those of the small designs, and as many experts are `fitted` as
    the truth has; `grid` sets fields of `RatePlan`.
    """
    model = _small_model(gate, link, expert)
    model = replace(model, d=d or model.d, n_experts=n_experts or model.n_experts)
    return _case_of_model(model, fitted, draws=draws, seed=seed, **grid)


def _small_model(gate: Any, link: Any, expert: str) -> MoEModel:
    """Return the model of a small design."""
    return MoEModel(gate, link, expert, *((2, 3) if gate in ("quadratic", "partial") else (3, 4)))


def _case_of_model(
    model: MoEModel,
    fitted: int | None = None,
    name: str | None = None,
    draws: int = 200,
    seed: int = 0,
    **grid: Any,
) -> Case:
    """A model with the best conditioned of many truths."""
    n_fitted = fitted or model.n_experts
    require(
        n_fitted >= model.n_experts, f"fit at least the {model.n_experts} true experts: {n_fitted}"
    )
    design = well_conditioned(model, seed=seed, draws=draws)
    fields = [model.gate, model.link, model.expert, f"d{model.d}", f"k{n_fitted}"]
    options = {"noise": design.noise, **_loss(model, n_fitted), **grid}
    plan = RatePlan(
        name or "-".join(fields),
        model.with_experts(n_fitted),
        model,
        design.truth,
        design.truth,
        seed=seed,
        **options,
    )
    return Case(plan, condition=design.condition)


def describe_settings() -> Mapping[str, str]:
    """Return every name with one line; the small designs by their pattern."""
    published = {name: _description(setting) for name, setting in SETTINGS.items()}
    pattern = "small-GATE-LINK-EXPERT"
    return published | {pattern: "about 30 parameters, well specified, noise 0.01"}


def _published(setting: Setting, seed: int, grid: Mapping[str, Any]) -> Case:
    """A paper's setting, on the paper's grid unless `grid` overrides it."""
    truth = setting.draw_truth(seed)
    reference, misfit = truth, 0.0
    if setting.regime == "misspecified":
        minimiser = population_minimiser(
            setting.fitted,
            lambda x: setting.truth.regression(truth, x),
            near=lift(setting.fitted, truth),
            n=POPULATION,
            starts=POPULATION_STARTS,
            refine=REFINED,
            seed=seed,
        )
        reference, misfit = minimiser.params, minimiser.misfit
    options = {
        "noise": setting.noise,
        "sizes": _spaced(*setting.sample_sizes),
        "repetitions": setting.repetitions,
        "loss": setting.loss,
        "paper": setting.loss_paper,
        **grid,
    }
    plan = RatePlan(
        setting.name, setting.fitted, setting.truth, truth, reference, seed=seed, **options
    )
    return Case(plan, setting.published_slope, misfit)


def _description(setting: Setting) -> str:
    """One line for the list of settings."""
    model = setting.fitted
    return (
        f"paper {setting.paper}, figure {setting.figure}: {model.gate} {model.link}, "
        f"{model.expert} experts, {model.n_experts} for {setting.truth.n_experts}, "
        f"{setting.regime}, slope {setting.published_slope:.2f}"
    )


def _spaced(first: int, last: int) -> tuple[int, ...]:
    """Seven sample sizes at equal ratios."""
    return tuple(round(first * (last / first) ** (i / 6)) for i in range(7))


def _loss(model: MoEModel, fitted: int) -> dict[str, Any]:
    """The papers' loss for a family: exact or with more experts than needed.

    No paper has a loss for a sigmoid over a linear or cosine score; there the one of paper 2 is
    taken, whose masses are exp(bias).
    """
    over = fitted > model.n_experts
    if model.link == "softmax" or model.gate not in ("quadratic", "partial"):
        return {"loss": "L2" if over else "L3", "paper": 2}
    kinds = ("L1", "L3") if model.gate == "quadratic" else ("L4", "L5")
    return {"loss": kinds[0] if over else kinds[1], "paper": 4}
