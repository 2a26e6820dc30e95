"""transformers' Trainer with the losses, parameter groups, schedules and checkpoints of routing.

loss = task loss + auxiliary losses of every routed layer, collected once per forward pass: what
activation checkpointing repeats in the backward pass is not counted again (`routing.collect`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tieline.core.errors import TielineError, require
from tieline.routing.losses import auxiliary_loss, collect_routing
from tieline.training.checkpoint import (
    load_generators,
    load_optimizer,
    mark_complete,
    save_generators,
    save_optimizer,
)
from tieline.training.config import TrainConfig
from tieline.training.controllers import GateSchedule, is_epsilon, rate_scheduler

__all__ = ["RoutingTrainer", "parameter_groups", "training_arguments"]

Told = Callable[[int, int], None]


def training_arguments(config: TrainConfig, out: Path, processes: int = 1) -> TrainingArguments:
    """What the Trainer is told: batches in the order of the data set, checkpoints, no reports."""
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


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Matrices with decay, vectors without, and the θ of smooth gates with a rate of their own."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    epsilon = [p for name, p in named if is_epsilon(name)]
    matrices = [p for name, p in named if p.ndim > 1]
    vectors = [p for name, p in named if p.ndim <= 1 and not is_epsilon(name)]
    optim = config.optim
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay, "lr": optim.rate},
        {"params": vectors, "weight_decay": 0.0, "lr": optim.rate},
        {"params": epsilon, "weight_decay": 0.0, "lr": optim.epsilon_rate, "epsilon": True},
    ]
    return [group for group in groups if group["params"]]


class RoutingTrainer(Trainer):
    """A Trainer of one `TrainConfig`.

    Args:
        config: the run.
        model: what is trained.
        args: from `training_arguments`.
        data: items in the order in which they are trained on.
        told: told the steps done, and of how many.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        args: TrainingArguments,
        data: Any,
        told: Told | None = None,
    ) -> None:
        super().__init__(model=model, args=args, train_dataset=data)
        self.config = config
        self.schedule = GateSchedule(model, config.gate, config.optim.steps)
        self.model_accepts_loss_kwargs = False  # the mean over a micro-batch, then over them
        self._task_losses: list[Tensor] = []
        self.remove_callback(PrinterCallback)
        self.add_callback(_Steps(self.schedule, told))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW over `parameter_groups`."""
        if self.optimizer is None:
            trained = cast(nn.Module, self.model if model is None else model)
            groups = parameter_groups(trained, self.config)
            fused = all(p.device.type in ("cpu", "cuda") for p in trained.parameters())
            self.optimizer = torch.optim.AdamW(groups, betas=self.config.optim.betas, fused=fused)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Warm-up and cosine for the weights, warm-up alone for ε."""
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
        """Task loss plus auxiliary losses; the task loss alone in evaluation."""
        with collect_routing(model) as records:
            outputs = model(**inputs)
        task = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        require(bool(torch.isfinite(task)), f"the loss is {task.item()}: stopped", TielineError)
        loss = task
        if model.training and records:
            step, losses = self.state.global_step, self.config.losses
            loss = task + auxiliary_loss(
                records,
                balance=losses.balance,
                router_z=losses.router_z,
                boundary=losses.boundary,
                sparsity=self.schedule.coefficient(step),
            )
            self.schedule.end(step, records)
            self._task_losses.append(task.detach())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's log with the task loss alone beside the loss."""
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
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            step = self.state.global_step
            mark_complete(Path(str(self.args.output_dir)) / f"checkpoint-{step}", step)

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
    """Moves the gate schedule and tells how far the run is."""

    def __init__(self, schedule: GateSchedule, told: Told | None) -> None:
        self.schedule, self.told = schedule, told

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set what this step needs."""
        self.schedule.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell that it is done."""
        if self.told is not None:
            self.told(state.global_step, state.max_steps)
