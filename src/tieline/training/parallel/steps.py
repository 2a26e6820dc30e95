"""One step after the other of a run on many ranks.

Rank r takes the r-th part of the rows of every micro-batch. The loss of a micro-batch is

    L = (Σ over all ranks of the loss of their targets) / targets + auxiliary losses of all tokens

and every rank differentiates its part of it, so that gradients need only be summed.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import default_data_collator, set_seed

from tieline.errors import TielineError, require
from tieline.routing.collect import auxiliary_loss, collect_routing
from tieline.routing.layer import MoE
from tieline.training.checkpoint import load_generators, load_optimizer, read_json, write_json
from tieline.training.config import TrainConfig
from tieline.training.engine import TrainResult, parameter_count
from tieline.training.parallel.checkpoint import RunState, load_weights, save_checkpoint
from tieline.training.parallel.gradients import (
    batch_counts,
    clip_gradients_,
    finish_gradients_,
    summed,
)
from tieline.training.parallel.processes import check_columns, rank_mesh
from tieline.training.parallel.shard import check_grid, parallelize_
from tieline.training.parallel.whole import WholeOptimizer
from tieline.training.schedules import GateSchedule, rate_scheduler
from tieline.training.tasks import Task, task_of
from tieline.training.trainer import parameter_groups

__all__ = ["RankRun", "default_expert_ranks", "grid_columns"]


def default_expert_ranks(model: nn.Module, ranks: int) -> int:
    """The largest number of expert ranks that cuts every layer evenly; all ranks if none does."""
    layers = [module.experts for module in model.modules() if isinstance(module, MoE)]
    for columns in range(ranks, 0, -1):
        rows = ranks // columns
        if ranks % columns == 0 and all(
            e.n_experts % columns == 0 and e.d_model % rows == 0 and e.d_hidden % rows == 0
            for e in layers
        ):
            return columns
    return ranks


def grid_columns(config: TrainConfig, model: nn.Module, expert_ranks: int | None) -> int:
    """Expert ranks of a run; refuses a grid that its rows or its layers do not fill.

    Args:
        config: the run.
        model: what it trains, not spread.
        expert_ranks: as asked for; None for `default_expert_ranks`.
    """
    ranks, micro = dist.get_world_size(), config.optim.batch // config.optim.accumulate
    require(micro >= ranks, f"{micro} rows of a micro-batch are too few for {ranks} ranks")
    columns = expert_ranks or default_expert_ranks(model, ranks)
    check_columns(columns, ranks)
    check_grid(model, ranks // columns, columns)
    return columns


class RankRun:
    """The moving parts of one run on one rank.

    Args:
        config: the run.
        out: its folder.
        checkpoint: where it goes on; None at the start.
    """

    def __init__(self, config: TrainConfig, out: Path, checkpoint: Path | None) -> None:
        self.config, self.out, self.checkpoint = config, out, checkpoint
        self.start = int(checkpoint.name.split("-")[1]) if checkpoint else 0
        self.task: Task = task_of(config)
        self.history: list[dict[str, float]] = []
        self.sums: list[tuple[float, float]] = []  # loss and task loss of the steps since a log

    def fresh(self) -> nn.Module:
        """A model that is not spread."""
        return self.task.model(self.config)

    def prepare(self, expert_ranks: int | None, timeout: float) -> None:
        """Data, the spread model, and what the checkpoint says of optimiser and schedules."""
        config = self.config
        self.data = self.task.data(config)
        set_seed(config.seed)
        self.model = self.fresh()
        self.parameters = parameter_count(self.model)
        self.schedule = GateSchedule(self.model, config.gate, config.optim.steps)
        if self.checkpoint is not None:
            load_weights(self.model, self.checkpoint)
        if config.recompute:
            options = {"use_reentrant": False}
            self.model.gradient_checkpointing_enable(options)  # type: ignore[operator]
        columns = grid_columns(config, self.model, expert_ranks)
        parallelize_(self.model, rank_mesh(columns, timeout=timeout)).train()
        # one tensor at a time: the others take lists, which must be of one mesh
        groups = parameter_groups(self.model, config)
        self.optimizer = torch.optim.AdamW(groups, betas=config.optim.betas, foreach=False)
        self.scheduler = rate_scheduler(self.optimizer, config.optim)
        if self.checkpoint is not None:
            whole = WholeOptimizer(self.optimizer)
            self.schedule.load(load_optimizer(self.checkpoint, whole, self.scheduler))
            self.history = read_json(self.checkpoint / "trainer_state.json")["log_history"]
            load_generators(self.checkpoint, 0)

    def step(self, step: int) -> None:
        """One optimiser step on all ranks, logged and checkpointed as the configuration says."""
        config, optim = self.config, self.config.optim
        self.schedule.begin(step)
        losses = torch.zeros(2, dtype=torch.float64)
        for place in range(optim.accumulate):
            losses += self._backward(step, place) / optim.accumulate
        finish_gradients_(self.model)
        norm = clip_gradients_(self.model.parameters(), optim.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        rate = float(self.scheduler.get_last_lr()[0])
        self._log(step + 1, losses, norm.item(), rate)
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == optim.steps:
            gates = self.schedule.state()
            state = RunState(self.model, self.optimizer, self.scheduler, gates, self.history)
            save_checkpoint(self.out, step + 1, config, state, self.fresh)

    def _backward(self, step: int, place: int) -> Tensor:
        """Gradients of one micro-batch; loss and task loss (2,) of all ranks."""
        inputs, config = self._share(step * self.config.optim.accumulate + place), self.config
        with collect_routing(self.model) as records:
            outputs = self.model(**inputs)
        task = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        targets = _targets(inputs)
        task = task * (targets / summed(targets)).to(task)
        part, counts = task, batch_counts(records)
        if records:
            part = task + auxiliary_loss(
                records,
                balance=config.losses.balance,
                router_z=config.losses.router_z,
                boundary=config.losses.boundary,
                sparsity=self.schedule.coefficient(step),
                counts=counts,
            )
            self.schedule.end(step, records, counts)
        found = summed(torch.stack([part.detach(), task.detach()]).double().cpu())
        require(
            bool(found.isfinite().all()), f"the loss is {found[0].item()}: stopped", TielineError
        )
        (part / config.optim.accumulate).backward()
        return found

    def _share(self, number: int) -> dict[str, Any]:
        """This rank's rows of micro-batch `number`, of all micro-batches of the run."""
        size = self.config.optim.batch // self.config.optim.accumulate
        rows = torch.arange(number * size, (number + 1) * size)
        own = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
        device = next(self.model.parameters()).device
        items = default_data_collator([self.data.train[i] for i in own.tolist()])
        return {name: value.to(device) for name, value in items.items()}

    def _log(self, step: int, losses: Tensor, norm: float, rate: float) -> None:
        self.sums.append((losses[0].item(), losses[1].item()))
        if step % self.config.log_every == 0:
            loss, task = (sum(values) / len(values) for values in zip(*self.sums, strict=True))
            told = {"loss": loss, "task_loss": task, "grad_norm": norm, "learning_rate": rate}
            self.history.append({**told, "epoch": step / self.config.optim.steps, "step": step})
            self.sums = []

    def finish(self, model: nn.Module, seconds: float, cpu_seconds: float) -> TrainResult:
        """Score and save the trained model, in one piece."""
        result = TrainResult(
            config=self.config.to_dict(),
            parameters=self.parameters,
            data=self.data.about,
            scores=self.task.evaluate(model, self.data, self.config),
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            resumed_from=self.start,
            history=self.history,
        )
        self.task.save(model, self.data, self.out / "model")
        write_json(self.out / "result.json", result.to_dict())
        return result


def _targets(inputs: dict[str, Any]) -> Tensor:
    """Number of terms that the model's loss is the mean of: predicted tokens, or rows."""
    labels = inputs["labels"]
    if labels.ndim == 2:  # the model shifts them, and passes over -100
        return (labels[:, 1:] != -100).sum().double()
    return torch.tensor(float(len(labels)), dtype=torch.float64, device=labels.device)
