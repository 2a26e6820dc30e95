"""Rate studies as settings, designs and plans: the models to fit and the grid.

A `RatePlan` has a key made of everything its results depend on, by which they are found again. A
repetition is drawn from a seed of its own, so it does not depend on the block it is fitted in.

Papers 2 and 4 publish sixteen settings:

    p2-1a-cosine, p2-1a-perturbed     P2 Fig. 1a: k = k* = 8, well specified
    p2-1b-cosine, p2-1b-perturbed     P2 Fig. 1b: k = k* + 1 = 9
    p2-2a-cosine, p2-2a-perturbed     P2 Fig. 2a: the truth has a linear router, ReLU experts
    p2-2b-linear, p2-2b-perturbed     P2 Fig. 2b: the truth has a linear router, experts (a·x + b)²
    p4-1a-softmax, p4-1a-sigmoid      P4 Fig. 1a: softmax quadratic truth, ReLU experts
    p4-1b-softmax, p4-1b-sigmoid      P4 Fig. 1b: the same with linear experts
    p4-2a-relu, p4-2a-linear          P4 Fig. 2a: sigmoid quadratic truth, sparse regime
    p4-2b-relu, p4-2b-linear          P4 Fig. 2b: sigmoid quadratic truth, dense regime

The truth of a paper is drawn once, as its appendix E says, from the seed. The papers leave open:
how many experts paper 4 fits ("N > N*"), here N* + 1; the loss of its softmax fits, here L_2 of
paper 2; the loss of figure 2 of paper 2, here L_3. With τ = 0 a zero row has no cosine (0/0): it
scores 0, and no nonzero row is near it, so the vanilla truth with its two zero rows is not a limit
of vanilla models.

Small well-specified designs show rates with p ≈ 30 parameters and noise sd 0.01:

    paper 2    d = 3, k* = 4, softmax link, linear, cosine or perturbed gate
    paper 4    d = 2, N* = 3, sigmoid or softmax link, quadratic or partial gate

Their truth is the draw with the best condition number of its information matrix (`information`)
and no ReLU that is dead or linear on the cube. Ill-conditioned truths obey the same laws, only at
far larger n. If even the best draw is worse than `GOOD_CONDITION`, it is improved by a random walk:
small normal steps, each kept if it lowers the condition number, until that is good enough. No fit
takes part in the choice. Of the twenty small designs with tanh or ReLU experts one needs the walk,
the sigmoid over a perturbed cosine with ReLU experts: its scores lie within 1 of the bias, where a
sigmoid is nearly linear, so that the size of a gate and that of a homogeneous expert are nearly
interchangeable. More draws do not help (the best of 2,000 is at 250,000).
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import require
from tieline.core.records import canonical_json
from tieline.lab.estimation.fit import (
    METHODS,
    Method,
    ModelRegression,
    lift_truth,
    population_minimiser,
)
from tieline.lab.estimation.identifiability import information, null_dimension
from tieline.lab.estimation.model import (
    GateName,
    LawName,
    LinkName,
    MoEModel,
    MoEParameters,
    repetition_seeds,
)
from tieline.lab.estimation.solvers import LeastSquares

ROUTER_SCALE = {"perturbed": 0.4}  # near τ1, where length and direction of a row both matter
OTHER_SCALE = 3.0
BIAS_SCALE = 0.5
EXPERT_SCALE = 1.0

NOISE = 0.01
GOOD_CONDITION = 1000 * (0.1 / NOISE) ** 2
"""Condition at which the worst direction has a standard error σ √(condition/n) of 0.1 at n = 1000.

In units of a parameter that alone moves f by 1, and with the largest eigenvalue taken as 1.
"""
MOST_STEPS, STEP = 1000, 0.1  # steps that a walk may try, and their size in units of the draws

SIZES = (1000, 3162, 10_000, 31_623)
MOST_ENTRIES = 6_400_000  # samples times parameters of a block, so that a killed run loses seconds
USUAL_STEPS = {"relu": 25, "two_layer": 25}
OTHER_STEPS = 12  # steps of a fit; kinks double them
POPULATION_SIZE, POPULATION_STARTS, REFINED_SIZE = 10_000, 3, 300_000
"""Samples without noise, starts, and samples of the last fit for the population minimiser."""

Regime = Literal["exact", "over", "misspecified"]


@dataclass(frozen=True)
class Setting:
    """A study that a paper printed."""

    name: str  # of the form p2-1a-cosine
    paper: int  # 2 or 4
    figure: str  # its figure
    truth: MoEModel  # model of the data
    fitted: MoEModel  # model that is fitted
    loss: str  # kind of the Voronoi loss, of `loss_paper`
    loss_paper: int  # paper that defines the loss
    # "exact", "over" (more experts than the truth) or "misspecified" (another family; the
    # loss is then taken against the population minimiser)
    regime: Regime
    published_slope: float  # the printed slope of log loss against log n
    zero_rows: int  # atoms of the truth whose router row and bias are zero, the last ones
    router_variance: float  # variance of router rows and biases of the others
    expert_variance: float  # variance of expert parameters
    noise: float = 0.1  # standard deviation of the noise; the printed variance is .01
    sample_sizes: tuple[int, int] = (1_000, 100_000)  # first and last n
    repetitions: int = 20  # experiments for each n

    def draw_truth(self, seed: int = 0) -> MoEParameters:
        """The true parameters: independent normals, zero router row and bias for the last atoms."""
        model, generator = self.truth, torch.Generator().manual_seed(seed)
        draws = [
            torch.randn(model.n_experts, dim, dtype=torch.float64, generator=generator)
            for dim in (model.router_dim + 1, model.expert_dim)
        ]
        gating = draws[0] * self.router_variance**0.5
        gating[model.n_experts - self.zero_rows :] = 0
        return MoEParameters(gating[:, :-1], gating[:, -1], draws[1] * self.expert_variance**0.5)


def setting(name: str) -> Setting:
    """The published setting of that name."""
    require(name in SETTINGS, f"unknown setting {name!r}; the settings are {', '.join(SETTINGS)}")
    return SETTINGS[name]


def _paper2_rate_setting(
    figure: str, gate, slope: float, *, truth=None, extra: int = 0, power: int = 0
):
    """Build a setting of paper 2: d = 32, k* = 8, τ = 0.1, router variance .01/d, experts 1/d."""
    expert = "polynomial" if power else "relu"

    def model(name, n: int) -> MoEModel:
        return MoEModel(name, "softmax", expert, 32, n, power=power or 2)

    return Setting(
        name=f"p2-{figure}-{gate}",
        paper=2,
        figure=figure,
        truth=model(truth or gate, 8),
        fitted=model(gate, 8 + extra),
        loss="L2" if extra else "L3",
        loss_paper=2,
        regime="over" if extra else "exact" if truth in (None, gate) else "misspecified",
        published_slope=slope,
        zero_rows=2,
        router_variance=0.01 / 32,
        expert_variance=1 / 32,
    )


def _paper4_setting(
    figure: str, tag: str, slope: float, links, expert: str, loss: str, zero: int = 0
):
    """Build a setting of paper 4: d = N* = 8, all variances 1/d, N* + 1 experts fitted.

    `links` are that of the truth and that of the fit; the last `zero` atoms have zero router rows.
    """
    truth, link = links

    def model(name, n: int) -> MoEModel:
        return MoEModel("quadratic", name, expert, 8, n)

    dense_sigmoid = link == "sigmoid" and zero == 0
    return Setting(
        name=f"p4-{figure}-{tag}",
        paper=4,
        figure=figure,
        truth=model(truth, 8),
        fitted=model(link, 9),
        loss=loss,
        loss_paper=2 if link == "softmax" else 4,
        regime="misspecified" if dense_sigmoid or truth != link else "over",
        published_slope=slope,
        zero_rows=zero,
        router_variance=1 / 8,
        expert_variance=1 / 8,
    )


SOFTMAX, MIXED, SIGMOID = ("softmax", "softmax"), ("softmax", "sigmoid"), ("sigmoid", "sigmoid")
SETTINGS = {
    published.name: published
    for published in (
        _paper2_rate_setting("1a", "cosine", -0.11),
        _paper2_rate_setting("1a", "perturbed", -0.50),
        _paper2_rate_setting("1b", "cosine", -0.05, extra=1),
        _paper2_rate_setting("1b", "perturbed", -0.47, extra=1),
        _paper2_rate_setting("2a", "cosine", -0.10, truth="linear"),
        _paper2_rate_setting("2a", "perturbed", -0.45, truth="linear"),
        _paper2_rate_setting("2b", "linear", -0.13, truth="linear", power=2),
        _paper2_rate_setting("2b", "perturbed", -0.47, truth="linear", power=2),
        _paper4_setting("1a", "softmax", -0.24, SOFTMAX, "relu", "L2"),
        _paper4_setting("1a", "sigmoid", -0.51, MIXED, "relu", "L3"),
        _paper4_setting("1b", "softmax", -0.07, SOFTMAX, "linear", "L2"),
        _paper4_setting("1b", "sigmoid", -0.46, MIXED, "linear", "L3"),
        _paper4_setting("2a", "relu", -0.54, SIGMOID, "relu", "L1", 2),
        _paper4_setting("2a", "linear", -0.07, SIGMOID, "linear", "L2", 2),
        _paper4_setting("2b", "relu", -0.53, SIGMOID, "relu", "L3", 0),
        _paper4_setting("2b", "linear", -0.44, SIGMOID, "linear", "L3", 0),
    )
}


@dataclass(frozen=True, eq=False)
class SmallDesign:
    """A model with a truth that samples of moderate size can identify."""

    model: MoEModel  # the family
    truth: MoEParameters  # the parameters
    condition: float  # condition number of the information matrix, flat directions apart
    draw: int  # which of the draws of the seed was kept
    steps: int = 0  # steps of the random walk that were tried
    noise: float = NOISE  # standard deviation of the noise


def small_design(
    paper: int,
    gate: GateName,
    *,
    link: LinkName | None = None,
    expert: str = "relu",
    seed: int = 0,
    draws: int = 200,
) -> SmallDesign:
    """Choose the best conditioned of `draws` random truths, improved to `GOOD_CONDITION`.

    Paper 2 has d = 3, four experts and softmax; paper 4 has d = 2, three experts and the sigmoid.
    """
    require(paper in (2, 4), f"the small designs are of papers 2 and 4, got {paper}")
    default, d, n = ("softmax", 3, 4) if paper == 2 else ("sigmoid", 2, 3)
    return well_conditioned(MoEModel(gate, link or default, expert, d, n), seed=seed, draws=draws)


@lru_cache(maxsize=64)
def well_conditioned(model: MoEModel, *, seed: int = 0, draws: int = 200) -> SmallDesign:
    """Choose the best conditioned of `draws` random truths of any model, improved if needed."""
    require(draws >= 1, f"need at least one draw, got {draws}")
    scores = [_condition_number(model, _draw_truth(model, seed, draw)) for draw in range(draws)]
    draw = min(range(draws), key=scores.__getitem__)
    finite = scores[draw] < float("inf")
    require(finite, f"none of {draws} draws is well conditioned: try another seed")
    return _lower_condition_number(
        SmallDesign(model, _draw_truth(model, seed, draw), scores[draw], draw), seed
    )


def _lower_condition_number(design: SmallDesign, seed: int) -> SmallDesign:
    """Take small random steps that lower the condition number, until it is good enough."""
    model, generator = design.model, torch.Generator().manual_seed(seed)
    while design.condition > GOOD_CONDITION and design.steps < MOST_STEPS:
        step = _normal_parameters(model, generator).flatten()
        truth = design.truth.like(design.truth.flatten() + STEP * step)
        condition, steps = _condition_number(model, truth), design.steps + 1
        better = condition < design.condition
        update = {"truth": truth, "condition": condition} if better else {}
        design = replace(design, steps=steps, **update)
    return design


def _draw_truth(model: MoEModel, seed: int, draw: int) -> MoEParameters:
    """Draw truth number `draw` of a seed."""
    return _normal_parameters(model, torch.Generator().manual_seed(seed * 1_000_003 + draw))


def _normal_parameters(model: MoEModel, generator: torch.Generator) -> MoEParameters:
    """Draw normal rows in the units of the design; the last bias is 0 for the softmax link."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n = model.n_experts
    bias = BIAS_SCALE * normal(n)
    if model.link == "softmax":
        bias = bias - bias[-1]
    return MoEParameters(
        ROUTER_SCALE.get(model.gate, OTHER_SCALE) * normal(n, model.router_dim),
        bias,
        EXPERT_SCALE * normal(n, model.expert_dim),
    )


def _condition_number(model: MoEModel, truth: MoEParameters) -> float:
    """Condition number of a truth; infinite if a kink misses the cube or nullity is too large."""
    if model.has_kink and not bool(truth_has_kinks_inside(model, truth).all()):
        return float("inf")
    spectrum = information(model, truth, n=1000)
    return spectrum.condition if spectrum.nullity == null_dimension(model) else float("inf")


def truth_has_kinks_inside(model: MoEModel, params: MoEParameters) -> Float[Tensor, " experts"]:
    """Return 1 where a kink a·x + b = 0 cuts the cube well inside, |b| <= ‖a‖_1 / 2, else 0."""
    a, b = params.experts[..., : model.d], params.experts[..., model.d]
    return (b.abs() <= 0.5 * a.abs().sum(dim=-1)).double()


@dataclass(frozen=True, eq=False)
class RatePlan:
    """A setting with the grid on which it is studied."""

    name: str  # of the setting
    model: MoEModel  # the family that is fitted
    source: MoEModel  # the family that the data come from
    truth: MoEParameters  # the parameters that they come from
    # parameters that the fits are compared with: the truth, or Ḡ where the model does not
    # contain it
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
    starts: int = 1  # starts for each data set; the best fit is kept
    method: Method = "lm"  # of fitting
    iterations: int = 200  # steps that Levenberg-Marquardt may try
    seed: int = 0  # of everything drawn
    # if not 0, a sample size n is emulated by this many samples with the noise noise ·
    # √(samples/n): the error of least squares in a model that contains the truth depends on
    # noise²/n alone, so n may be 1e12
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
        emulates = 0 <= self.samples <= sizes[0]
        require(emulates, f"emulate sizes of at least {self.samples} samples, got {sizes[0]}")
        self.source.check(self.truth)

    @property
    def centre(self) -> MoEParameters:
        """The reference lifted to the model's number of atoms; fits start near it."""
        return lift_truth(self.model, self.reference)

    def drawn(self, n: int) -> tuple[int, float]:
        """Number of samples drawn to emulate the sample size n, and their noise."""
        if not self.samples:
            return n, self.noise
        return self.samples, self.noise * math.sqrt(self.samples / n)

    @property
    def key(self) -> str:
        """Sixteen digits of a SHA-256 over everything that a repetition depends on."""
        fields = ("name", "noise", "law", "loss", "paper", "power", "shrink", "starts", "method")
        facts = {name: getattr(self, name) for name in (*fields, "iterations", "seed")}
        if self.samples:
            facts["samples"] = self.samples
        for name in ("model", "source"):
            facts[name] = asdict(getattr(self, name))
        for name in ("truth", "reference"):
            facts[name] = getattr(self, name).flatten().tolist()
        return hashlib.sha256(canonical_json(facts).encode()).hexdigest()[:16]


class RepetitionBlock(NamedTuple):
    """Repetitions that are fitted together."""

    n: int
    radius: float
    repetitions: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of samples in the block."""
        return self.n * len(self.repetitions)

    def seeds(self, plan: RatePlan) -> list[int]:
        """Seeds of the repetitions; all start radii have the same data."""
        all_seeds = repetition_seeds(plan.seed, self.n, plan.repetitions)
        return [all_seeds[repetition] for repetition in self.repetitions]


def plan_blocks(
    plan: RatePlan, done: Sequence[tuple[int, float, int]] = (), most: int = MOST_ENTRIES
) -> list[RepetitionBlock]:
    """Split the repetitions (n, radius, repetition) not in `done` into blocks, largest first."""
    finished = set(done)
    blocks = []
    for n in plan.sizes:
        for radius in plan.radii:
            todo = [r for r in range(plan.repetitions) if (n, radius, r) not in finished]
            size = max(1, most // (plan.drawn(n)[0] * plan.model.n_parameters))
            groups = [todo[begin : begin + size] for begin in range(0, len(todo), size)]
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
    problem.normal_equations(theta, which)
    started = time.perf_counter()
    problem.normal_equations(theta, which)
    per_row = (time.perf_counter() - started) / n
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


def case_from(setting: Case | RatePlan | Setting | MoEModel | str, **grid: Any) -> Case:
    """Build the case of a setting, model, plan or name, with fields of its plan replaced."""
    if isinstance(setting, Case):
        return replace(setting, plan=replace(setting.plan, **grid))
    if isinstance(setting, RatePlan):
        return Case(replace(setting, **grid))
    if isinstance(setting, MoEModel):
        return _case_of_model(setting, **grid)
    return named_case(setting if isinstance(setting, str) else setting.name, **grid)


def named_case(name: str, seed: int = 0, **grid: Any) -> Case:
    """Build the case of a published setting or of a small design `small-GATE-LINK-EXPERT`.

    `grid` sets fields of `RatePlan`: sizes, repetitions, radii, noise, ...
    """
    if name in SETTINGS:
        return _published_case(SETTINGS[name], seed, grid)
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
    """Build the case of any combination, with the best conditioned of many drawn truths.

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
    """Build the case of a model with the best conditioned of many truths."""
    n_fitted = fitted or model.n_experts
    require(
        n_fitted >= model.n_experts, f"fit at least the {model.n_experts} true experts: {n_fitted}"
    )
    design = well_conditioned(model, seed=seed, draws=draws)
    fields = [model.gate, model.link, model.expert, f"d{model.d}", f"k{n_fitted}"]
    options = {"noise": design.noise, **paper_loss(model, n_fitted), **grid}
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
    """Describe every setting in one line, by name; small designs by their pattern."""
    published = {
        name: f"paper {setting.paper}, figure {setting.figure}: {setting.fitted.gate} "
        f"{setting.fitted.link}, {setting.fitted.expert} experts, {setting.fitted.n_experts} for "
        f"{setting.truth.n_experts}, {setting.regime}, slope {setting.published_slope:.2f}"
        for name, setting in SETTINGS.items()
    }
    pattern = "small-GATE-LINK-EXPERT"
    return published | {pattern: "about 30 parameters, well specified, noise 0.01"}


def _published_case(setting: Setting, seed: int, grid: Mapping[str, Any]) -> Case:
    """Build the case of a published setting, on its own grid unless `grid` overrides it."""
    truth, (first, last) = setting.draw_truth(seed), setting.sample_sizes
    reference, misfit = truth, 0.0
    if setting.regime == "misspecified":
        minimiser = population_minimiser(
            setting.fitted,
            lambda x: setting.truth.regression(truth, x),
            near=lift_truth(setting.fitted, truth),
            n=POPULATION_SIZE,
            starts=POPULATION_STARTS,
            refine=REFINED_SIZE,
            seed=seed,
        )
        reference, misfit = minimiser.params, minimiser.misfit
    options = {
        "noise": setting.noise,
        "sizes": tuple(round(first * (last / first) ** (i / 6)) for i in range(7)),
        "repetitions": setting.repetitions,
        "loss": setting.loss,
        "paper": setting.loss_paper,
        **grid,
    }
    plan = RatePlan(
        setting.name, setting.fitted, setting.truth, truth, reference, seed=seed, **options
    )
    return Case(plan, setting.published_slope, misfit)


def paper_loss(model: MoEModel, fitted: int) -> dict[str, Any]:
    """Loss of the papers for a family, exact or over-specified, as fields of `RatePlan`.

    No paper has a loss for a sigmoid over a linear or cosine score, which therefore has that of
    paper 2, whose masses are exp(bias).
    """
    overspecified = fitted > model.n_experts
    if model.link == "softmax" or model.gate not in ("quadratic", "partial"):
        return {"loss": "L2" if overspecified else "L3", "paper": 2}
    losses = ("L1", "L3") if model.gate == "quadratic" else ("L4", "L5")
    return {"loss": losses[0] if overspecified else losses[1], "paper": 4}
