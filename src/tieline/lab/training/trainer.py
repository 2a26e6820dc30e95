"""transformers' Trainer with the losses, schedules and checkpoints of routed models.

Auxiliary losses are collected once per forward pass: what activation checkpointing repeats in the
backward pass is not counted again.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tieline.core.errors import require
from tieline.lab.training.checkpoint import (
    load_generators,
    load_optimizer,
    mark_complete,
    save_generators,
    save_optimizer,
)
from tieline.lab.training.config import TrainConfig
from tieline.lab.training.step import (
    GateSchedule,
    adamw,
    check_finite,
    rate_scheduler,
    routing_loss,
    task_loss,
)
from tieline.routing.losses import collect_routing

OnStep = Callable[[int, int], None]


def training_arguments(config: TrainConfig, out: Path, processes: int = 1) -> TrainingArguments:
    """Return the Trainer's arguments: batches in the order of the data set, no reports."""
    optim = config.optim
    micro, rest = divmod(optim.batch, optim.accumulate * processes)
    require(rest == 0, f"a batch of {optim.batch} does not divide over {processes} processes")
    return TrainingArguments(
        output_dir=str(out),
        max_steps=optim.steps,
        per_device_train_batch_size=micro,
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
    )


class RoutingTrainer(Trainer):
    """A Trainer of one `TrainConfig`.

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
        self.model_accepts_loss_kwargs = False  # the mean over a micro-batch, then over them
        self._task_losses: list[Tensor] = []
        self.remove_callback(PrinterCallback)
        self.add_callback(_Steps(self.schedule, on_step))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimiser of the run."""
        if self.optimizer is None:
            trained = cast(nn.Module, self.model if model is None else model)
            fused = all(p.device.type in ("cpu", "cuda") for p in trained.parameters())
            self.optimizer = adamw(trained, self.config.optim, fused=fused)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Make the schedule of the learning rates."""
        if self.lr_scheduler is None:
            chosen = optimizer or self.optimizer
            plain = getattr(chosen, "optimizer", chosen)
            self.lr_scheduler = rate_scheduler(plain, self.config.optim)
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
        task = task_loss(outputs)
        check_finite(task)
        loss = task
        if model.training and records:
            step = self.state.global_step
            loss = task + routing_loss(records, self.config.losses, self.schedule, step)
            self._task_losses.append(task.detach())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the task loss in addition to the whole loss."""
        if self._task_losses:
            logs["task_loss"] = torch.stack(self._task_losses).mean().item()
            self._task_losses = []
        super().log(logs, start_time)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(str(output_dir or self.args.output_dir))
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle that nothing reads

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{step}"
        try:
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                mark_complete(folder, step)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # it is incomplete
            raise

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            state = self.schedule.state()
            save_optimizer(Path(output_dir), self.optimizer, self.lr_scheduler, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = load_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)
            self.schedule.load(state)

    def _save_rng_state(self, output_dir: str) -> None:
        save_generators(Path(output_dir), self.args.process_index)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_generators(Path(checkpoint), self.args.process_index)


class _Steps(TrainerCallback):
    """Moves the gate schedule and reports progress."""

    def __init__(self, schedule: GateSchedule, on_step: OnStep | None) -> None:
        self.schedule, self.on_step = schedule, on_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the gates for this step."""
        self.schedule.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report progress."""
        if self.on_step is not None:
            self.on_step(state.global_step, state.max_steps)
