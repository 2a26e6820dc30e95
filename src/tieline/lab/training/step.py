"""The parts of a training step: losses, optimiser, learning rates and the schedule of the gates.

Both ways to train use them: transformers' Trainer on one process (`trainer`), and the loop over
many ranks (`parallel.run`).

    loss           task loss + auxiliary losses of the routed layers
    rate(t)/peak   t/warmup during the warm-up, then a half cosine down to the final share
    rate of ε      the same warm-up, then constant: ε has to follow the scores to the end
    k*(t)          constant, linear down to k, constant (paper 1, section 7.5)
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tieline.core.errors import TielineError, require
from tieline.lab.training.config import GateConfig, LossConfig, OptimConfig
from tieline.lab.training.controllers import BudgetSchedule, SparsityController
from tieline.routing.layer import MoE
from tieline.routing.losses import Counts, LayerRouting, auxiliary_loss
from tieline.routing.smooth import BandGate


def rate_share(step: int, optim: OptimConfig) -> float:
    """Return the share of the peak rate at a step, counted from 0."""
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    done = (step - optim.warmup) / max(1, optim.steps - optim.warmup)
    return optim.final_share + (1 - optim.final_share) * (1 + math.cos(math.pi * done)) / 2


def epsilon_share(step: int, optim: OptimConfig) -> float:
    """Return the share of ε's own rate at a step."""
    return min(1.0, (step + 1) / max(1, optim.warmup))


def rate_scheduler(optimizer: Optimizer, optim: OptimConfig) -> LambdaLR:
    """Schedule warm-up and cosine for the weights, warm-up alone for the group of ε."""
    shares = [
        partial(epsilon_share if group.get("epsilon") else rate_share, optim=optim)
        for group in optimizer.param_groups
    ]
    return LambdaLR(optimizer, shares)


def is_epsilon(name: str) -> bool:
    """Return whether a parameter is the θ of a smooth gate, by its name in the model."""
    return name.endswith("gate.theta") or name == "theta"


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Group matrices with decay, vectors without, and the θ of smooth gates with their own rate."""
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    epsilon = [p for name, p in parameters if is_epsilon(name)]
    matrices = [p for name, p in parameters if p.ndim > 1]
    vectors = [p for name, p in parameters if p.ndim <= 1 and not is_epsilon(name)]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay, "lr": optim.rate},
        {"params": vectors, "weight_decay": 0.0, "lr": optim.rate},
        {"params": epsilon, "weight_decay": 0.0, "lr": optim.epsilon_rate, "epsilon": True},
    ]
    return [group for group in groups if group["params"]]


def adamw(model: nn.Module, optim: OptimConfig, **options: Any) -> torch.optim.AdamW:
    """Make AdamW over `parameter_groups`; `options` choose its implementation."""
    return torch.optim.AdamW(parameter_groups(model, optim), betas=optim.betas, **options)


class GateSchedule:
    """Changes the gates of a model over the steps; its only state is the coefficient λ.

    Args:
        model: the model.
        gate: the variant.
        steps: of the run.
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

    def begin(self, step: int) -> None:
        """Set the budget of this step."""
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
        """Change λ by the mean number of experts per token and layer in this step.

        Args:
            step: counted from 0.
            records: routing of the layers in this process.
            counts: their routing in all processes; by default this process is the only one.
        """
        if self.sparsity is not None and step >= self.dense_until:
            layer_counts = counts or [Counts.of(record.routing.weights) for record in records]
            assigned = sum(count.assigned.sum().item() for count in layer_counts)
            self.sparsity.move(assigned / sum(count.tokens.item() for count in layer_counts))

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {} if self.sparsity is None else {"coefficient": self.sparsity.coefficient}

    def load(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        if self.sparsity is not None:
            self.sparsity.coefficient = float(state["coefficient"])


def task_loss(outputs: Any) -> Tensor:
    """Return the loss of a model's outputs, a dictionary or a tuple."""
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]


def routing_loss(
    records: Sequence[LayerRouting],
    losses: LossConfig,
    schedule: GateSchedule,
    step: int,
    counts: Sequence[Counts] | None = None,
) -> Tensor:
    """Return the auxiliary losses of a forward pass, and move the schedule by its routing.

    Args:
        records: from `collect_routing`; not empty.
        losses: coefficients.
        schedule: of the gates.
        step: counted from 0.
        counts: assignments and tokens of all processes; by default this process is the only one.
    """
    loss = auxiliary_loss(
        records,
        balance=losses.balance,
        router_z=losses.router_z,
        boundary=losses.boundary,
        sparsity=schedule.coefficient(step),
        counts=counts,
    )
    schedule.end(step, records, counts)
    return loss


def check_finite(loss: Tensor) -> None:
    """Stop the run if a loss is NaN or infinite."""
    require(bool(loss.isfinite().all()), f"the loss is {loss.tolist()}: stopped", TielineError)
