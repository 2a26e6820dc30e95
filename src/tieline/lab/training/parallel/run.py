"""Run a recipe on several processes: `torchrun --nproc-per-node 2 -m tieline train RECIPE`.

Rank r takes the r-th share of the rows of every micro-batch and differentiates its share of

    L = (Σ over all ranks of the loss of their targets) / targets + auxiliary losses of all tokens

so that gradients only need to be summed. The loop is written out instead of left to transformers'
Trainer, which would wrap the model by accelerate: its FSDP averages gradients over ranks and knows
one mesh, where experts need two and uneven shares need sums. Everything else is shared with the
Trainer (`step`, `checkpoint`, data order, files), so losses agree to rounding, and a run may be
stopped on one kind and resumed on the other.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import default_data_collator, set_seed

from tieline.core.errors import require
from tieline.core.processes import first_rank, is_first, join_processes, naming_lost_ranks
from tieline.lab.training.checkpoint import (
    checkpoint_step,
    last_checkpoint,
    load_generators,
    load_groups,
    read_json,
    write_json,
)
from tieline.lab.training.config import TrainConfig
from tieline.lab.training.engine import (
    Report,
    TrainingResult,
    prepare_folder,
    save_result,
    stored_result,
)
from tieline.lab.training.parallel.checkpoint import (
    TrainingState,
    load_checkpoint,
    save_checkpoint,
    whole_model,
)
from tieline.lab.training.parallel.experts import (
    check_columns,
    check_grid,
    parallelize_,
    rank_mesh,
)
from tieline.lab.training.parallel.gradients import (
    batch_counts,
    clip_gradients_,
    finish_gradients_,
    summed,
)
from tieline.lab.training.step import (
    GateSchedule,
    adamw,
    check_finite,
    rate_scheduler,
    routing_loss,
    task_loss,
)
from tieline.lab.training.tasks import Task, task_of
from tieline.routing.layer import MoE
from tieline.routing.losses import collect_routing


def default_expert_ranks(model: nn.Module, ranks: int) -> int:
    """Return the largest number of expert ranks that cuts every layer evenly, or all ranks."""
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
    """Return the expert ranks of a run; raises if its rows or layers do not fill the grid.

    Args:
        config: the run.
        model: its model, not spread.
        expert_ranks: as asked for; None for `default_expert_ranks`.
    """
    ranks, micro = dist.get_world_size(), config.optim.batch // config.optim.accumulate
    require(micro >= ranks, f"{micro} rows of a micro-batch are too few for {ranks} ranks")
    columns = expert_ranks or default_expert_ranks(model, ranks)
    check_columns(columns, ranks)
    check_grid(model, ranks // columns, columns)
    return columns


class RankRun:
    """The state of one run on one rank.

    Args:
        config: the run.
        out: its folder.
        checkpoint: where it continues; None at the start.
    """

    def __init__(self, config: TrainConfig, out: Path, checkpoint: Path | None) -> None:
        self.config, self.out, self.checkpoint = config, out, checkpoint
        self.start = checkpoint_step(checkpoint)
        self.task: Task = task_of(config)
        self.history: list[dict[str, float]] = []
        self.sums: list[tuple[float, float]] = []  # loss and task loss of the steps since a log

    def new_model(self) -> nn.Module:
        """Make a model that is not spread."""
        return self.task.model(self.config)

    def prepare(self, expert_ranks: int | None, timeout: float) -> None:
        """Load the data, spread the model, restore optimiser and schedules from the checkpoint."""
        config = self.config
        self.data = self.task.data(config)
        set_seed(config.seed)
        self.model = self.new_model()
        self.schedule = GateSchedule(self.model, config.gate, config.optim.steps)
        if config.recompute:
            options = {"use_reentrant": False}
            self.model.gradient_checkpointing_enable(options)  # type: ignore[operator]
        columns = grid_columns(config, self.model, expert_ranks)
        parallelize_(self.model, rank_mesh(columns, timeout=timeout)).train()
        # one tensor at a time: other implementations take lists, which must be of one mesh
        self.optimizer = adamw(self.model, config.optim, foreach=False)
        self.scheduler = rate_scheduler(self.optimizer, config.optim)
        if self.checkpoint is not None:
            load_checkpoint(self.checkpoint, self.model, self.optimizer)
            self.schedule.load(load_groups(self.checkpoint, self.optimizer, self.scheduler))
            self.history = read_json(self.checkpoint / "trainer_state.json")["log_history"]
            load_generators(self.checkpoint, 0)

    def step(self, step: int) -> None:
        """Do one optimiser step on all ranks; log and checkpoint as the configuration says."""
        config, optim = self.config, self.config.optim
        self.schedule.begin(step)
        losses = torch.zeros(2, dtype=torch.float64)
        for micro_batch in range(optim.accumulate):
            losses += self._backward(step, micro_batch) / optim.accumulate
        finish_gradients_(self.model)
        norm = clip_gradients_(self.model.parameters(), optim.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        rate = float(self.scheduler.get_last_lr()[0])
        self._log(step + 1, losses, norm.item(), rate)
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == optim.steps:
            gates = self.schedule.state()
            state = TrainingState(self.model, self.optimizer, self.scheduler, gates, self.history)
            save_checkpoint(self.out, step + 1, config, state)

    def _backward(self, step: int, micro_batch: int) -> Tensor:
        """Compute gradients of one micro-batch; returns loss and task loss (2,) of all ranks."""
        config = self.config
        inputs = self._rows_of_rank(step * config.optim.accumulate + micro_batch)
        with collect_routing(self.model) as records:
            outputs = self.model(**inputs)
        targets, task = _targets(inputs), task_loss(outputs)
        task = task * (targets / summed(targets)).to(task)
        loss, counts = task, batch_counts(records)
        if records:
            loss = task + routing_loss(records, config.losses, self.schedule, step, counts)
        losses = summed(torch.stack([loss.detach(), task.detach()]).double().cpu())
        check_finite(losses)
        (loss / config.optim.accumulate).backward()
        return losses

    def _rows_of_rank(self, number: int) -> dict[str, Any]:
        """Return this rank's rows of a micro-batch, numbered over the whole run."""
        size = self.config.optim.batch // self.config.optim.accumulate
        rows = torch.arange(number * size, (number + 1) * size)
        rows = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
        device = next(self.model.parameters()).device
        items = default_data_collator([self.data.train[i] for i in rows.tolist()])
        return {name: value.to(device) for name, value in items.items()}

    def _log(self, step: int, losses: Tensor, norm: float, rate: float) -> None:
        self.sums.append((losses[0].item(), losses[1].item()))
        if step % self.config.log_every == 0:
            loss, task = (sum(column) / len(column) for column in zip(*self.sums, strict=True))
            values = {"loss": loss, "task_loss": task, "grad_norm": norm, "learning_rate": rate}
            self.history.append({**values, "epoch": step / self.config.optim.steps, "step": step})
            self.sums = []


def _targets(inputs: dict[str, Any]) -> Tensor:
    """Return the number of terms that the loss is the mean of: predicted tokens, or rows."""
    labels = inputs["labels"]
    if labels.ndim == 2:  # the model shifts them and ignores -100
        return (labels[:, 1:] != -100).sum().double()
    return torch.tensor(float(len(labels)), dtype=torch.float64, device=labels.device)


RESUME = "start again with --resume to go on from the newest checkpoint"


def run_parallel(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Report | None = None,
    expert_ranks: int | None = None,
    timeout: float = 600.0,
) -> TrainingResult | None:
    """Run `engine.run` on the processes that torchrun started; only rank 0 returns the result.

    Args:
        config: a complete run, from a recipe.
        out: a new folder that all processes see; with `resume`, that of the same run on any number
            of processes.
        resume: continue from the newest complete checkpoint, from the start if there is none.
        progress: called at each stage, on rank 0.
        expert_ranks: ranks that share the experts of a layer; see `default_expert_ranks`.
        timeout: seconds after which a rank that does not answer is lost.
    """
    joined = nullcontext() if dist.is_initialized() else join_processes(timeout=timeout)
    with joined:
        on_stage = progress if progress is not None and is_first() else lambda stage, done, of: None
        with naming_lost_ranks(RESUME):
            start = first_rank(lambda: _prepare_run(config, out, resume, expert_ranks))
            if start["done"]:
                return stored_result(out) if is_first() else None
            run = RankRun(config, out, Path(start["checkpoint"]) if start["checkpoint"] else None)
            on_stage("data", 0, 1)
            run.prepare(expert_ranks, timeout)
        return _train_and_score(run, on_stage)


def _train_and_score(run: RankRun, on_stage: Report) -> TrainingResult | None:
    """Run all steps; then rank 0 reads the weights of the last checkpoint and scores the model."""
    steps, began, worked = run.config.optim.steps, time.perf_counter(), time.process_time()
    with _quiet_views():
        for step in range(run.start, steps):
            with naming_lost_ranks(f"in step {step + 1}; {RESUME}"):
                run.step(step)
            on_stage("train", step + 1, steps)
    if not is_first():  # only rank 0 scores; waiting for it could exceed the timeout
        return None
    times = time.perf_counter() - began, time.process_time() - worked
    on_stage("score", 0, 1)
    checkpoint = last_checkpoint(run.out)
    assert checkpoint is not None  # every run ends with one
    trained = run.task, run.data, whole_model(checkpoint, run.new_model)
    return save_result(run.config, run.out, trained, times, run.start, run.history)


def _prepare_run(
    config: TrainConfig, out: Path, resume: bool, expert_ranks: int | None
) -> dict[str, Any]:
    """Check everything, then fetch the data and make the folder for the other ranks."""
    checkpoint = prepare_folder(config, out, resume)
    done = resume and stored_result(out) is not None
    if not done:
        task = task_of(config)
        grid_columns(config, task.model(config), expert_ranks)
        task.data(config)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", config.to_dict())
    return {"checkpoint": str(checkpoint) if checkpoint else "", "done": done}


@contextmanager
def _quiet_views() -> Iterator[None]:
    """Silence FSDP's warning that outputs are views: nothing here changes them in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        yield
