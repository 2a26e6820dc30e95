"""What changes over the steps: learning rates, the budget k*, and the sparsity of a ReLU gate.

rate(t)/peak   t/warmup up to the warm-up, then a half cosine down to the final share
rate of ε      the same warm-up, then constant: ε has to follow the scores to the end
k*(t)          constant, linear down to k, constant (paper 1, section 7.5)
"""

import math
from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tieline.routing.collect import LayerRouting
from tieline.routing.gates import Gate
from tieline.routing.layer import MoE
from tieline.routing.losses import Counts
from tieline.routing.smooth import SmoothTopK
from tieline.training.config import GateConfig, OptimConfig
from tieline.training.controllers import BudgetSchedule, SparsityController

__all__ = ["GateSchedule", "epsilon_share", "is_epsilon", "rate_scheduler", "rate_share"]


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
