"""Small well-specified designs on which rates can be seen: p ≈ 30 parameters, noise sd 0.01.

    paper 2    d = 3, k* = 4, softmax link, linear, cosine or perturbed gate
    paper 4    d = 2, N* = 3, sigmoid or softmax link, quadratic or partial gate

The truth is drawn by seed and kept for a good condition number of its information matrix
(`information`) and no ReLU that is dead or linear on the cube: the best of the draws is taken.
Ill-conditioned truths obey the same laws, only at far larger n.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require
from tieline.estimation.gates import GateName, LinkName
from tieline.estimation.information import information
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters
from tieline.estimation.symmetry import null_dimension

__all__ = ["SmallDesign", "small_design", "well_conditioned"]

ROUTER_SCALE = {"perturbed": 0.4}  # near τ1, where length and direction of a row both matter
OTHER_SCALE = 3.0
EXPERT_SCALE = 1.0


@dataclass(frozen=True, eq=False)
class SmallDesign:
    """A model with a truth that data of moderate size can see.

    Attributes:
        model: the family.
        truth: the parameters.
        condition: condition number of the information matrix, flat directions apart.
        draw: which of the draws of the seed was kept.
        noise: standard deviation of the noise.
    """

    model: MoEModel
    truth: MoEParameters
    condition: float
    draw: int
    noise: float = 0.01


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
    """The best conditioned of `draws` random truths.

    Args:
        paper: 2 (d = 3, four experts, softmax) or 4 (d = 2, three experts, sigmoid).
        gate: of the model.
        link: of the model; None is that of the paper.
        expert: of the model.
        power: p of polynomial experts.
        activation: φ of two-layer experts.
        seed: of the draws.
        draws: how many truths are tried.
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
    """The best conditioned of `draws` random truths of a model of any size."""
    require(draws >= 1, f"need at least one draw, got {draws}")
    best = min(
        ((_score(model, seed, draw), draw) for draw in range(draws)), key=lambda pair: pair[0]
    )
    require(best[0] < float("inf"), f"none of {draws} draws is well conditioned: try another seed")
    return SmallDesign(model, _draw(model, seed, best[1]), *best)


def _draw(model: MoEModel, seed: int, draw: int) -> MoEParameters:
    """Truth number `draw` of a seed: normal rows, the last bias 0 for the softmax link."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n = model.n_experts
    bias = 0.5 * normal(n)
    if model.link == "softmax":
        bias = bias - bias[-1]
    return MoEParameters(
        ROUTER_SCALE.get(model.gate, OTHER_SCALE) * normal(n, model.router_width),
        bias,
        EXPERT_SCALE * normal(n, model.expert_width),
    )


def _score(model: MoEModel, seed: int, draw: int) -> float:
    """Condition number of a draw; infinite if a kink misses the cube or too much is flat."""
    truth = _draw(model, seed, draw)
    relu = "relu" in (model.expert, model.activation if model.expert == "two_layer" else "")
    if relu and not bool(kinks_inside(model, truth).all()):
        return float("inf")
    found = information(model, truth, n=1000)
    return found.condition if found.nullity == null_dimension(model) else float("inf")


def kinks_inside(model: MoEModel, params: MoEParameters) -> Float[Tensor, " experts"]:
    """Whether a·x + b = 0 cuts the cube well inside: |b| <= ‖a‖_1 / 2."""
    a, b = params.experts[..., : model.d], params.experts[..., model.d]
    return (b.abs() <= 0.5 * a.abs().sum(dim=-1)).double()
