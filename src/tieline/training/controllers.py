"""Controllers with running state; gates and routers hold none.

SparsityController   λ ← λ · g^{sign(target - sparsity)}     ReMoE's adaptive L1 coefficient
BalanceController    b_e ← b_e + γ sign(mean load - load_e)  loss-free balance of DeepSeek-V3
BudgetSchedule       k*(t): constant, then linear down to k  annealing of paper 1, section 7.5

What changes over the steps: learning rates, the budget k*, and the sparsity of a ReLU gate.

rate(t)/peak   t/warmup up to the warm-up, then a half cosine down to the final share
rate of ε      the same warm-up, then constant: ε has to follow the scores to the end
k*(t)          constant, linear down to k, constant (paper 1, section 7.5)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tieline.core.errors import require
from tieline.routing.gates import Gate, SelectiveGate
from tieline.routing.layer import MoE
from tieline.routing.losses import Counts, LayerRouting
from tieline.routing.smooth import SmoothTopK
from tieline.training.config import GateConfig, OptimConfig

__all__ = [
    "BalanceController",
    "BudgetSchedule",
    "GateSchedule",
    "SparsityController",
    "epsilon_share",
    "is_epsilon",
    "rate_scheduler",
    "rate_share",
]


@dataclass
class SparsityController:
    """Coefficient λ of the L1 loss that drives a ReLU gate to k of E experts on average.

    Args:
        k: experts per token to reach.
        n_experts: number of experts E.
        coefficient: λ at the start.
        growth: factor g > 1 by which a step moves λ.
        warmup: steps of dense training before the loss is enforced (two epochs in paper 1, 7.2):
            `update` returns 0 and leaves λ where it is.
        steps: updates so far; a resumed run gives it back.
    """

    k: int | float
    n_experts: int
    coefficient: float = 1e-8
    growth: float = 1.2
    warmup: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        require(
            0 < self.k <= self.n_experts, f"need 0 < k <= experts, got {self.k}, {self.n_experts}"
        )
        require(self.growth > 1, f"growth must exceed 1, got {self.growth}")
        require(self.coefficient > 0, f"the coefficient must be positive: {self.coefficient}")
        require(
            min(self.warmup, self.steps) >= 0,
            f"warmup and steps must be >= 0, got {self.warmup}, {self.steps}",
        )

    def update(self, weights: Float[Tensor, "*batch experts"]) -> float:
        """Raise λ while too many experts are in use, lower it while too few; returns the λ to use.

        That is 0 for the first `warmup` updates.
        """
        return self.move((weights != 0).double().mean().item() * self.n_experts)

    def move(self, in_use: float) -> float:
        """The same from the mean number of experts in use, which may be that of many processes."""
        self.steps += 1
        if self.steps <= self.warmup:
            return 0.0
        excess = in_use - self.k
        if excess != 0:
            self.coefficient *= self.growth if excess > 0 else 1 / self.growth
        return self.coefficient


@dataclass
class BalanceController:
    """Moves the selection bias of a gate towards equal load, without a loss.

    Args:
        gate: a gate with a `selection_bias`.
        rate: step γ per update.
    """

    gate: SelectiveGate
    rate: float = 1e-3

    def __post_init__(self) -> None:
        require(self.gate.selection_bias is not None, "the gate has no selection_bias to move")
        require(self.rate > 0, f"the rate must be positive, got {self.rate}")

    @torch.no_grad()
    def update(self, weights: Float[Tensor, "*batch experts"]) -> None:
        """Lower the bias of experts above the mean load, raise it below, by the rate."""
        load = (weights != 0).flatten(0, -2).sum(dim=0).double()
        assert self.gate.selection_bias is not None
        bias = self.gate.selection_bias
        bias += self.rate * torch.sign(load.mean() - load).to(bias)


@dataclass(frozen=True)
class BudgetSchedule:
    """k*(t): `start` until step `hold`, then linear down to `end` at step `until`, then `end`."""

    start: float
    end: float
    hold: int
    until: int

    def __post_init__(self) -> None:
        require(0 <= self.hold <= self.until, f"need 0 <= hold <= until: {self.hold}, {self.until}")

    def __call__(self, step: int) -> float:
        """The budget at a step; assign it to `gate.budget`."""
        if step < self.hold:
            return self.start
        if step >= self.until:
            return self.end
        done = (step - self.hold) / (self.until - self.hold)
        return self.start + done * (self.end - self.start)


def rate_share(step: int, optim: OptimConfig) -> float:
    """Share of the peak rate at a step, counted from 0."""
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    done = (step - optim.warmup) / max(1, optim.steps - optim.warmup)
    return optim.final_share + (1 - optim.final_share) * (1 + math.cos(math.pi * done)) / 2


def epsilon_share(step: int, optim: OptimConfig) -> float:
    """Share of ε's own rate at a step."""
    return min(1.0, (step + 1) / max(1, optim.warmup))


def rate_scheduler(optimizer: Optimizer, optim: OptimConfig) -> LambdaLR:
    """Warm-up and cosine for the weights, warm-up alone for the groups marked "epsilon"."""
    shares = [
        partial(epsilon_share if group.get("epsilon") else rate_share, optim=optim)
        for group in optimizer.param_groups
    ]
    return LambdaLR(optimizer, shares)


def is_epsilon(name: str) -> bool:
    """Whether a parameter is the θ of a smooth gate, by its name in the model."""
    return name.endswith("gate.theta") or name == "theta"


class GateSchedule:
    """Moves the gates of a model over the steps; all its state is one number, λ.

    Args:
        model: the model.
        gate: the variant.
        steps: of the run.
    """

    def __init__(self, model: nn.Module, gate: GateConfig, steps: int) -> None:
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        self.gates: list[Gate] = [layer.gate for layer in layers]
        self.budget: BudgetSchedule | None = None
        if gate.anneal is not None:
            start = next(g.budget for g in self.gates if isinstance(g, SmoothTopK))
            hold, until = (round(share * steps) for share in gate.anneal)
            self.budget = BudgetSchedule(start, float(gate.k), hold, until)
        self.sparsity: SparsityController | None = None
        if gate.dense_share is not None:
            self.sparsity = SparsityController(k=gate.k, n_experts=layers[0].experts.n_experts)
        self.dense_until = round((gate.dense_share or 0.0) * steps)

    def begin(self, step: int) -> None:
        """Set the budget of this step."""
        if self.budget is not None:
            for gate in self.gates:
                if isinstance(gate, SmoothTopK):
                    gate.budget = self.budget(step)

    def coefficient(self, step: int) -> float:
        """Coefficient of the sparsity loss at this step."""
        if self.sparsity is None or step < self.dense_until:
            return 0.0
        return self.sparsity.coefficient

    def end(
        self,
        step: int,
        records: Sequence[LayerRouting],
        counts: Sequence[Counts] | None = None,
    ) -> None:
        """Move λ by how many experts this step's tokens used, on average over layers.

        Args:
            step: counted from 0.
            records: what the layers did here.
            counts: what they did in all processes; by default this one is alone.
        """
        if self.sparsity is not None and step >= self.dense_until:
            found = counts or [Counts.of(record.routing.weights) for record in records]
            assigned = sum(count.assigned.sum().item() for count in found)
            self.sparsity.move(assigned / sum(count.tokens.item() for count in found))

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {} if self.sparsity is None else {"coefficient": self.sparsity.coefficient}

    def load(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        if self.sparsity is not None:
            self.sparsity.coefficient = float(state["coefficient"])
