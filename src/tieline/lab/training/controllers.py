"""Controllers with running state; gates and routers hold none.

SparsityController   λ ← λ · g^{sign(target - sparsity)}     ReMoE's adaptive L1 coefficient
BalanceController    b_e ← b_e + γ sign(mean load - load_e)  loss-free balance of DeepSeek-V3
BudgetSchedule       k*(t): constant, then linear down to k  annealing of paper 1, section 7.5
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import require
from tieline.routing.gates import SelectiveGate


@dataclass
class SparsityController:
    """Coefficient λ of the L1 loss that drives a ReLU gate to k of E experts on average.

    Args:
        k: experts per token to reach.
        n_experts: number of experts E.
        coefficient: λ at the start.
        growth: factor g > 1 by which a step moves λ.
        warmup: steps of dense training before the loss is enforced (two epochs in paper 1, 7.2),
            during which `update` returns 0 and does not change λ.
        steps: updates so far; set it when a run is resumed.
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
        """Raise λ if too many experts are in use, lower it if too few; returns the λ to use.

        Returns 0 for the first `warmup` updates.
        """
        return self.move((weights != 0).double().mean().item() * self.n_experts)

    def move(self, in_use: float) -> float:
        """Update λ from the mean number of experts in use, for example of many processes."""
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
        """Return the budget at a step; assign it to `gate.budget`."""
        if step < self.hold:
            return self.start
        if step >= self.until:
            return self.end
        done = (step - self.hold) / (self.until - self.hold)
        return self.start + done * (self.end - self.start)
