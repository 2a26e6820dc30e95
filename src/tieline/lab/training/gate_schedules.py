"""Schedules that change gates over the steps of a run; gates hold no such state themselves.

SparsityController   λ ← λ · g^{sign(target - sparsity)}     ReMoE's adaptive L1 coefficient
BudgetSchedule       k*(t): constant, then linear down to k  annealing of paper 1, section 7.5
Cooling              τ(t) of a soft gate                      paper 0 (`soft_to_hard`)
GateSchedule         the schedules of all gates of a model
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.errors import require
from tieline.lab.training.config import GateConfig
from tieline.lab.training.soft_to_hard import Cooling
from tieline.routing.layer import MoE
from tieline.routing.losses import Counts, LayerRouting
from tieline.routing.smooth_gates import BandGate


@dataclass
class SparsityController:
    """Coefficient λ of the L1 loss that drives a ReLU gate to k of E experts on average.

    Args:
        k: target number of experts per token.
        n_experts: number of experts E.
        coefficient: λ at the start.
        growth: factor g > 1 by which an update multiplies or divides λ.
        warmup: updates of dense training before the loss is enforced (two epochs in paper 1, 7.2),
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
        """Raise λ if too many experts are in use, lower it if too few; return the λ to use.

        Returns 0 for the first `warmup` updates.
        """
        return self.move((weights != 0).double().mean().item() * self.n_experts)

    def move(self, in_use: float) -> float:
        """Update λ from the mean number of experts in use, for example over many processes."""
        self.steps += 1
        if self.steps <= self.warmup:
            return 0.0
        excess = in_use - self.k
        if excess != 0:
            self.coefficient *= self.growth if excess > 0 else 1 / self.growth
        return self.coefficient


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
        progress = (step - self.hold) / (self.until - self.hold)
        return self.start + progress * (self.end - self.start)


class GateSchedule:
    """Changes the gates of a model over the steps; its state is λ of `sparsity` and τ of `cooling`.

    Args:
        model: the model.
        gate: routing variant of the run.
        steps: number of steps of the run.
    """

    def __init__(self, model: nn.Module, gate: GateConfig, steps: int) -> None:
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        self.smooth = [m.gate for m in layers if isinstance(m.gate, BandGate)]
        self.budget: BudgetSchedule | None = None
        if gate.anneal is not None:
            hold, until = (round(share * steps) for share in gate.anneal)
            self.budget = BudgetSchedule(self.smooth[0].budget, float(gate.k), hold, until)
        self.sparsity: SparsityController | None = None
        if gate.dense_share is not None:
            self.sparsity = SparsityController(k=gate.k, n_experts=layers[0].experts.n_experts)
        self.dense_until = round((gate.dense_share or 0.0) * steps)
        self.cooling = None if gate.cooling is None else Cooling(model, gate.cooling, steps)

    def begin(self, step: int) -> None:
        """Set the budget and the temperature of this step."""
        if self.cooling is not None:
            self.cooling.begin(step)
        if self.budget is not None:
            for gate in self.smooth:
                gate.budget = self.budget(step)

    def coefficient(self, step: int) -> float:
        """Return the coefficient of the sparsity loss at this step."""
        if self.sparsity is None or step < self.dense_until:
            return 0.0
        return self.sparsity.coefficient

    def end(
        self, step: int, records: Sequence[LayerRouting], counts: Sequence[Counts] | None = None
    ) -> None:
        """Update λ from the mean number of experts per token and layer in this step.

        Args:
            step: counted from 0.
            records: routing of the layers in this process.
            counts: counts over all processes per record; by default those of `records`.
        """
        if self.sparsity is not None and step >= self.dense_until:
            layer_counts = counts or [Counts.from_weights(x.routing.weights) for x in records]
            assigned = sum(count.assigned.sum().item() for count in layer_counts)
            self.sparsity.move(assigned / sum(count.tokens.item() for count in layer_counts))

    def after_update(self, done: int) -> None:
        """Restore the norms of cooled routers after optimiser step number `done`."""
        if self.cooling is not None:
            self.cooling.end(done)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        state = {} if self.sparsity is None else {"coefficient": self.sparsity.coefficient}
        return state if self.cooling is None else state | {"tau": self.cooling.temperature}

    def load(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        if self.sparsity is not None:
            self.sparsity.coefficient = float(state["coefficient"])
        if self.cooling is not None:
            self.cooling.temperature = float(state["tau"])
