"""Settings of rate studies: the sixteen that papers 2 and 4 publish, and small designs.

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
far larger n. If even the best draw is worse than `ENOUGH`, it is walked: small normal steps, each
kept if it lowers the condition number, until that is enough. Only the condition number decides,
never a fit. Of the twenty small designs with tanh or ReLU experts one needs it, the sigmoid over a
perturbed cosine with ReLU experts: its scores lie within 1 of the bias, where a sigmoid is nearly
straight, so that the size of a gate and of a homogeneous expert nearly trade. More draws do not
help (the best of 2,000 is at 250,000).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import require
from tieline.lab.estimation.identifiability import information
from tieline.lab.estimation.model import GateName, LinkName, MoEModel, MoEParameters
from tieline.lab.estimation.symmetry import null_dimension

ROUTER_SCALE = {"perturbed": 0.4}  # near τ1, where length and direction of a row both matter
OTHER_SCALE = 3.0
BIAS_SCALE = 0.5
EXPERT_SCALE = 1.0

NOISE = 0.01
ENOUGH = 1000 * (0.1 / NOISE) ** 2
"""Condition at which the worst direction has a standard error σ √(condition/n) of 0.1 at n = 1000.

In units of a parameter that alone moves f by 1, and with the largest eigenvalue taken as 1.
"""
MOST_STEPS, STEP = 1000, 0.1  # steps that a walk may try, and their size in units of the draws

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


def _paper2(figure: str, gate, slope: float, *, truth=None, extra: int = 0, power: int = 0):
    """A setting of paper 2: d = 32, k* = 8, τ = 0.1, router variance .01/d, experts 1/d."""
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


def _paper4(figure: str, tag: str, slope: float, *, truth, link, expert: str, loss: str, zero: int):
    """A setting of paper 4: d = N* = 8, all variances 1/d, N* + 1 experts fitted."""

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


def _sigmoid(expert: str, loss: str, zero: int) -> dict:
    """Figure 2 of paper 4: sigmoid truth."""
    return {"truth": "sigmoid", "link": "sigmoid", "expert": expert, "loss": loss, "zero": zero}


def _softmax_data(link: str, expert: str, loss: str) -> dict:
    """Figure 1 of paper 4: softmax truth."""
    return {"truth": "softmax", "link": link, "expert": expert, "loss": loss, "zero": 0}


SETTINGS = {
    published.name: published
    for published in (
        _paper2("1a", "cosine", -0.11),
        _paper2("1a", "perturbed", -0.50),
        _paper2("1b", "cosine", -0.05, extra=1),
        _paper2("1b", "perturbed", -0.47, extra=1),
        _paper2("2a", "cosine", -0.10, truth="linear"),
        _paper2("2a", "perturbed", -0.45, truth="linear"),
        _paper2("2b", "linear", -0.13, truth="linear", power=2),
        _paper2("2b", "perturbed", -0.47, truth="linear", power=2),
        _paper4("1a", "softmax", -0.24, **_softmax_data("softmax", "relu", "L2")),
        _paper4("1a", "sigmoid", -0.51, **_softmax_data("sigmoid", "relu", "L3")),
        _paper4("1b", "softmax", -0.07, **_softmax_data("softmax", "linear", "L2")),
        _paper4("1b", "sigmoid", -0.46, **_softmax_data("sigmoid", "linear", "L3")),
        _paper4("2a", "relu", -0.54, **_sigmoid("relu", "L1", 2)),
        _paper4("2a", "linear", -0.07, **_sigmoid("linear", "L2", 2)),
        _paper4("2b", "relu", -0.53, **_sigmoid("relu", "L3", 0)),
        _paper4("2b", "linear", -0.44, **_sigmoid("linear", "L3", 0)),
    )
}


@dataclass(frozen=True, eq=False)
class SmallDesign:
    """A model with a truth that data of moderate size can see."""

    model: MoEModel  # the family
    truth: MoEParameters  # the parameters
    condition: float  # condition number of the information matrix, flat directions apart
    draw: int  # which of the draws of the seed was kept
    steps: int = 0  # steps that it was walked from there, kept or not
    noise: float = NOISE  # standard deviation of the noise


def small_design(
    paper: int,
    gate: GateName,
    *,
    link: LinkName | None = None,
    expert: str = "relu",
    power: int = 2,
    activation: str = "tanh",
    seed: int = 0,
    draws: int = 200,
) -> SmallDesign:
    """The best conditioned of `draws` random truths, walked on if that is not `ENOUGH`.

    Paper 2 has d = 3, four experts and softmax; paper 4 has d = 2, three experts and the sigmoid.
    """
    require(paper in (2, 4), f"the small designs are of papers 2 and 4, got {paper}")
    d, n = (3, 4) if paper == 2 else (2, 3)
    model = MoEModel(
        gate,
        link or ("softmax" if paper == 2 else "sigmoid"),
        expert,
        d,
        n,
        power=power,
        activation=activation,
    )
    return well_conditioned(model, seed=seed, draws=draws)


@lru_cache(maxsize=64)
def well_conditioned(model: MoEModel, *, seed: int = 0, draws: int = 200) -> SmallDesign:
    """The best conditioned of `draws` random truths of a model of any size, walked if need be."""
    require(draws >= 1, f"need at least one draw, got {draws}")
    scores = [_condition(model, _draw(model, seed, draw)) for draw in range(draws)]
    draw = min(range(draws), key=scores.__getitem__)
    finite = scores[draw] < float("inf")
    require(finite, f"none of {draws} draws is well conditioned: try another seed")
    return _improve_condition(
        SmallDesign(model, _draw(model, seed, draw), scores[draw], draw), seed
    )


def _improve_condition(design: SmallDesign, seed: int) -> SmallDesign:
    """Small steps from a truth, kept if they lower its condition number, until it is enough."""
    model, generator = design.model, torch.Generator().manual_seed(seed)
    while design.condition > ENOUGH and design.steps < MOST_STEPS:
        step = _normal(model, generator).flatten()
        truth = design.truth.like(design.truth.flatten() + STEP * step)
        condition, steps = _condition(model, truth), design.steps + 1
        better = condition < design.condition
        kept = {"truth": truth, "condition": condition} if better else {}
        design = replace(design, steps=steps, **kept)
    return design


def _draw(model: MoEModel, seed: int, draw: int) -> MoEParameters:
    """Truth number `draw` of a seed."""
    return _normal(model, torch.Generator().manual_seed(seed * 1_000_003 + draw))


def _normal(model: MoEModel, generator: torch.Generator) -> MoEParameters:
    """Normal rows in the units of the design, the last bias 0 for the softmax link."""

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


def _condition(model: MoEModel, truth: MoEParameters) -> float:
    """Condition number of a truth; infinite if a kink misses the cube or too much is flat."""
    relu = "relu" in (model.expert, model.activation if model.expert == "two_layer" else "")
    if relu and not bool(kinks_inside(model, truth).all()):
        return float("inf")
    spectrum = information(model, truth, n=1000)
    return spectrum.condition if spectrum.nullity == null_dimension(model) else float("inf")


def kinks_inside(model: MoEModel, params: MoEParameters) -> Float[Tensor, " experts"]:
    """Whether a·x + b = 0 cuts the cube well inside: |b| <= ‖a‖_1 / 2."""
    a, b = params.experts[..., : model.d], params.experts[..., model.d]
    return (b.abs() <= 0.5 * a.abs().sum(dim=-1)).double()
