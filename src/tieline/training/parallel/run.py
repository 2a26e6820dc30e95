"""One batch on many ranks: parts of its loss, and gradients that are those of the whole.

    L = Σ_r L_r,   L_r = (Σ_{t on r} ℓ_t) / N + auxiliary parts,   ∇L = Σ_r ∇L_r

N and the assignments of every expert are counted over all ranks (`batch_counts`), so that the
auxiliary losses are those of the whole batch, and not the mean of those of its parts: the product
of means in the balance loss is not the mean of products.

One step after the other of a run on many ranks.

Rank r takes the r-th part of the rows of every micro-batch. The loss of a micro-batch is

    L = (Σ over all ranks of the loss of their targets) / targets + auxiliary losses of all tokens

and every rank differentiates its part of it, so that gradients need only be summed.

Running a recipe on several processes: `torchrun --nproc-per-node 2 -m tieline train RECIPE`.

The loop is written out instead of handed to transformers' Trainer. The Trainer would wrap the model
by accelerate, whose FSDP averages gradients over ranks and knows one mesh, where experts need two
and uneven shares need sums. Everything else is the Trainer path's own: data order, micro-batches,
parameter groups, schedules, auxiliary losses, files. So losses agree to rounding, and a run may be
stopped on one kind and resumed on the other.
"""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import default_data_collator, set_seed

from tieline.core.errors import TielineError, require
from tieline.routing.layer import MoE
from tieline.routing.losses import Counts, LayerRouting, auxiliary_loss, collect_routing
from tieline.training.checkpoint import load_generators, load_optimizer, read_json, write_json
from tieline.training.config import TrainConfig
from tieline.training.controllers import GateSchedule, rate_scheduler
from tieline.training.engine import (
    Report,
    Task,
    TrainResult,
    parameter_count,
    prepare_folder,
    task_of,
)
from tieline.training.parallel.checkpoint import (
    RunState,
    WholeOptimizer,
    load_weights,
    save_checkpoint,
    whole_model,
)
from tieline.training.parallel.experts import check_grid, parallelize_, replicated_parameters
from tieline.training.parallel.processes import (
    check_columns,
    first_rank,
    is_first,
    join_processes,
    naming_lost_ranks,
    rank_mesh,
)
from tieline.training.trainer import parameter_groups

__all__ = [
    "RankRun",
    "batch_counts",
    "clip_gradients_",
    "default_expert_ranks",
    "finish_gradients_",
    "gradient_norm",
    "grid_columns",
    "run_on_ranks",
    "run_parallel",
    "summed",
]


def summed(value: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Sum over all ranks, without a gradient; itself where there is one process."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def batch_counts(records: Sequence[LayerRouting]) -> list[Counts]:
    """Per record the assignments and tokens of all ranks, in one message.

    Hand them to `auxiliary_loss(records, ..., counts=...)`, which then gives this rank's part.
    """
    own = [Counts.of(record.routing.weights) for record in records]
    flat = [torch.cat([c.assigned, c.tokens.view(1)]) for c in own]
    if not flat:
        return []
    everywhere = summed(torch.cat(flat)).split([len(c) for c in flat])
    counts = [Counts(c[:-1], c[-1]) for c in everywhere]
    require(all(c.tokens > 0 for c in counts), "no rank has a token: the batch is empty")
    return counts


def finish_gradients_(model: nn.Module) -> None:
    """Sum over ranks the gradients of the parameters that are whole on each, in one message.

    FSDP sums the others during the backward pass. A parameter that no rank used keeps no gradient.
    """
    parameters = list(replicated_parameters(model))
    if not parameters or not dist.is_initialized():
        return
    used = torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([used.to(grads[0].device), *(g.detach().double().flatten() for g in grads)])
    dist.all_reduce(flat)
    sizes = [len(parameters), *(p.numel() for p in parameters)]
    used, *sums = flat.split(sizes)
    for parameter, count, grad in zip(parameters, used.tolist(), sums, strict=True):
        parameter.grad = grad.view_as(parameter).to(parameter) if count else None


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Float[Tensor, ""]:
    """Euclidean norm of the whole gradient (float64), its parts being on different ranks."""
    grads = [p.grad for p in parameters if p.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    square = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        own = grad.to_local() if isinstance(grad, DTensor) else grad
        square += own.double().square().sum() / _copies(grad)
    return summed(square).sqrt()


def clip_gradients_(parameters: Iterable[nn.Parameter], max_norm: float) -> Float[Tensor, ""]:
    """Scale the whole gradient to norm `max_norm` if it is longer; returns its norm before.

    The factor is min(1, max_norm / (norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`, which
    cannot be used here since it does not mix gradients of different meshes.
    """
    require(max_norm > 0, f"max_norm must be positive, got {max_norm}")
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return norm


def _copies(grad: Tensor) -> int:
    """Ranks that hold the same part of a gradient."""
    if not dist.is_initialized():
        return 1
    if not isinstance(grad, DTensor):
        return dist.get_world_size()
    mesh, parts = grad.device_mesh, 1
    for dim, placement in enumerate(grad.placements):
        parts *= mesh.size(dim) if placement.is_shard() else 1
    return dist.get_world_size() // parts


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


RESUME = "start again with --resume to go on from the newest checkpoint"


def run_parallel(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Report | None = None,
    expert_ranks: int | None = None,
    timeout: float = 600.0,
) -> TrainResult | None:
    """`engine.run` on the processes that torchrun started; the result is that of rank 0.

    Args:
        config: a whole run, from a recipe.
        out: a new folder that all processes see; with `resume`, that of the same run, whatever
            number of processes it ran on.
        resume: go on from the newest complete checkpoint, from the start if there is none.
        progress: told the stages, on rank 0.
        expert_ranks: ranks that share the experts of a layer; see `default_expert_ranks`.
        timeout: seconds after which a rank that does not answer counts as lost.
    """
    with join_processes(timeout=timeout):
        return run_on_ranks(
            config,
            out,
            resume=resume,
            progress=progress,
            expert_ranks=expert_ranks,
            timeout=timeout,
        )


def run_on_ranks(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Report | None = None,
    expert_ranks: int | None = None,
    timeout: float = 600.0,
) -> TrainResult | None:
    """`run_parallel` where the processes have met already."""
    tell = progress if progress is not None and is_first() else lambda stage, done, of: None
    with naming_lost_ranks(RESUME):
        found = first_rank(lambda: _prepared(config, out, resume, expert_ranks))
        if found["done"]:
            return TrainResult(**read_json(out / "result.json")) if is_first() else None
        run = RankRun(config, out, Path(found["checkpoint"]) if found["checkpoint"] else None)
        tell("data", 0, 1)
        run.prepare(expert_ranks, timeout)
    began, worked = time.perf_counter(), time.process_time()
    with _quiet_views():
        for step in range(run.start, config.optim.steps):
            with naming_lost_ranks(f"in step {step + 1}; {RESUME}"):
                run.step(step)
            tell("train", step + 1, config.optim.steps)
        with naming_lost_ranks("while gathering the trained model"):
            model = whole_model(run.model, run.fresh)
    times = time.perf_counter() - began, time.process_time() - worked
    tell("score", 0, 1)
    # the others need not wait for the scores: a timeout would be theirs
    return None if model is None else run.finish(model.eval(), *times)


def _prepared(
    config: TrainConfig, out: Path, resume: bool, expert_ranks: int | None
) -> dict[str, Any]:
    """Fetch the data and make the folder, so that the other ranks find both; after all refusals."""
    checkpoint = prepare_folder(config, out, resume)
    done = resume and (out / "result.json").is_file()
    if not done:
        task = task_of(config)
        grid_columns(config, task.model(config), expert_ranks)
        task.data(config)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", config.to_dict())
    return {"checkpoint": str(checkpoint) if checkpoint else "", "done": done}


@contextmanager
def _quiet_views() -> Iterator[None]:
    """FSDP warns that outputs are views, which matters to in-place changes; there are none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        yield
