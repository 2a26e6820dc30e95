"""transformers' Trainer with losses, learning rates, gate schedules and checkpoints for routing.

    loss           task loss + auxiliary losses of the routed layers
    rate(t)/peak   t/warmup during the warm-up, then a half cosine down to the final share
    rate of ε      the same warm-up, then constant, so that ε follows the scores to the end

Auxiliary losses are collected once per forward pass; the forward pass that activation checkpointing
repeats during backward is not counted.

Under torchrun every process has the whole model and an equal share of the rows of a micro-batch,
and `DistributedDataParallel` averages the gradients. The balance loss is a product of means, which
differs from the mean of the processes' products. Assignments and tokens are therefore counted over
all processes (`batch_counts`), and each process adds its part of the auxiliary losses of the whole
batch, times the number of processes. Losses and gradients then equal those of a single process.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tieline.core.collectives import naming_lost_ranks
from tieline.core.errors import TielineError, require
from tieline.core.files import follow_umask
from tieline.lab.training.checkpoint import (
    load_generators,
    load_optimizer,
    mark_complete,
    save_generators,
    save_optimizer,
    save_weights,
)
from tieline.lab.training.config import OptimConfig, TrainConfig
from tieline.lab.training.gate_schedules import GateSchedule
from tieline.routing.losses import Counts, LayerRouting, auxiliary_loss, collect_routing

OnStep = Callable[[int, int], None]
RESUME_HINT = "start again with --resume to go on from the newest checkpoint"


def rate_share(step: int, optim: OptimConfig) -> float:
    """Return the share of the peak rate at a step, counted from 0."""
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    progress = (step - optim.warmup) / max(1, optim.steps - optim.warmup)
    return optim.final_share + (1 - optim.final_share) * (1 + math.cos(math.pi * progress)) / 2


def epsilon_share(step: int, optim: OptimConfig) -> float:
    """Return the share of ε's own rate at a step."""
    return min(1.0, (step + 1) / max(1, optim.warmup))


def is_epsilon(name: str) -> bool:
    """Return whether a parameter is the θ of a smooth gate, by its name in the model."""
    return name.endswith("gate.theta") or name == "theta"


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Group matrices with weight decay, vectors without, and θ of smooth gates at its own rate."""
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


def batch_counts(records: Sequence[LayerRouting]) -> list[Counts]:
    """Return the assignments and tokens of each record over all processes, by one all-reduce.

    `auxiliary_loss(records, ..., counts=...)` then returns this process's part of the loss.
    """
    local = [Counts.from_weights(record.routing.weights) for record in records]
    sizes = [len(counts.assigned) + 1 for counts in local]
    flat = torch.cat([torch.cat([c.assigned, c.tokens.view(1)]) for c in local])
    if dist.is_initialized():
        dist.all_reduce(flat)
    return [Counts(counts[:-1], counts[-1]) for counts in flat.split(sizes)]


def process_mean(value: Tensor) -> Tensor:
    """Return the mean of a value over all processes, detached."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def rows_per_process(optim: OptimConfig) -> int:
    """Return the rows of a micro-batch per process; raises if they do not divide evenly."""
    processes = dist.get_world_size() if dist.is_initialized() else 1
    micro = optim.batch // optim.accumulate
    require(
        micro % processes == 0,
        f"{micro} rows of a micro-batch do not divide over {processes} processes",
    )
    return micro // processes


def training_arguments(config: TrainConfig, out: Path) -> TrainingArguments:
    """Return the Trainer's arguments: batches in the order of the data set, no reports."""
    optim = config.optim
    return TrainingArguments(
        output_dir=str(out),
        max_steps=optim.steps,
        per_device_train_batch_size=rows_per_process(optim),
        gradient_accumulation_steps=optim.accumulate,
        max_grad_norm=optim.clip,
        learning_rate=optim.rate,
        seed=config.seed,
        data_seed=config.seed,
        train_sampling_strategy="sequential",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=config.checkpoint_every,
        save_total_limit=2,
        gradient_checkpointing=config.recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
        # selects gloo; without it, processes without accelerators would train independently
        use_cpu=dist.is_initialized() and not torch.accelerator.is_available(),
    )


class RoutingTrainer(Trainer):
    """Trainer of the run of one `TrainConfig`.

    Args:
        config: the run.
        model: the model to train.
        args: from `training_arguments`.
        data: items in training order.
        on_step: called with the number of steps done and their total.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        args: TrainingArguments,
        data: Any,
        on_step: OnStep | None = None,
    ) -> None:
        super().__init__(model=model, args=args, train_dataset=data)
        self.config = config
        self.schedule = GateSchedule(model, config.gate, config.optim.steps)
        self.model_accepts_loss_kwargs = False  # mean per micro-batch, then over micro-batches
        self._task_losses: list[Tensor] = []
        self.remove_callback(PrinterCallback)
        self.add_callback(_StepCallback(self.schedule, on_step))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create AdamW with the groups of `parameter_groups`."""
        if self.optimizer is None:
            trained = cast(nn.Module, self.model if model is None else model)
            fused = all(p.device.type in ("cpu", "cuda") for p in trained.parameters())
            optim = self.config.optim
            groups = parameter_groups(trained, optim)
            self.optimizer = torch.optim.AdamW(groups, betas=optim.betas, fused=fused)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Create the schedule of the learning rates."""
        if self.lr_scheduler is None:
            trained_optimizer, optim = optimizer or self.optimizer, self.config.optim
            inner_optimizer = getattr(trained_optimizer, "optimizer", trained_optimizer)
            shares = [  # warm-up alone for the group of ε
                partial(epsilon_share if group.get("epsilon") else rate_share, optim=optim)
                for group in inner_optimizer.param_groups
            ]
            self.lr_scheduler = LambdaLR(inner_optimizer, shares)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return task loss plus auxiliary losses; the task loss alone in evaluation."""
        with collect_routing(model) as records:
            outputs = model(**inputs)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        mean = process_mean(loss)
        require(bool(mean.isfinite()), f"the loss is {mean.item()}: stopped", TielineError)
        if model.training and records:
            self._task_losses.append(mean)
            loss = loss + self._routing_loss(records)
        return (loss, outputs) if return_outputs else loss

    def _routing_loss(self, records: Sequence[LayerRouting]) -> Tensor:
        """Return the auxiliary losses of a forward pass, and update the schedule by its routing."""
        step, processes = self.state.global_step, self.args.world_size
        counts = batch_counts(records) if processes > 1 else None
        coefficients = asdict(self.config.losses)
        coefficients["sparsity"] = self.schedule.coefficient(step)
        loss = auxiliary_loss(records, **coefficients, counts=counts)
        self.schedule.end(step, records, counts)
        return processes * loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of a micro-batch; the error of a lost process names the step."""
        with naming_lost_ranks(f"in step {self.state.global_step + 1}; {RESUME_HINT}"):
            return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the task loss in addition to the total loss."""
        if self._task_losses:
            logs["task_loss"] = torch.stack(self._task_losses).mean().item()
            self._task_losses = []
        super().log(logs, start_time)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Save the weights of the model.

        Unlike transformers' method, it does not pickle the training arguments: nothing reads them,
        and that writer does not report a full disk.
        """
        folder = Path(str(output_dir or self.args.output_dir))
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PreTrainedModel):
            model.save_pretrained(folder, state_dict=state_dict)
        else:
            save_weights(model, folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint and mark it complete; remove it if that fails."""
        step = self.state.global_step
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{step}"
        try:
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                follow_umask(folder)
                mark_complete(folder, step)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # it is incomplete
            raise

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the states of optimiser, scheduler and gates as safetensors and JSON."""
        if self.args.should_save:
            state = self.schedule.state()
            save_optimizer(Path(output_dir), self.optimizer, self.lr_scheduler, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore the states of optimiser, scheduler and gates."""
        if checkpoint is not None:
            state = load_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)
            self.schedule.load(state)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the states of the random generators."""
        if self.args.should_save:
            save_generators(Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the states of the random generators."""
        if checkpoint is not None:
            load_generators(Path(checkpoint))


class _StepCallback(TrainerCallback):
    """Callback that advances the gate schedule and reports progress."""

    def __init__(self, schedule: GateSchedule, on_step: OnStep | None) -> None:
        self.schedule, self.on_step = schedule, on_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set budget and temperature of the gates for this step."""
        self.schedule.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the norms of cooled routers, and report progress."""
        self.schedule.after_update(state.global_step)
        if self.on_step is not None:
            self.on_step(state.global_step, state.max_steps)
