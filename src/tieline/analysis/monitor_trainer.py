"""The monitor inside transformers' Trainer: its scalars join what the Trainer logs.

    trainer = Trainer(model, args, train_dataset=data)
    monitor_trainer(trainer, every=10)
    trainer.train()

A Trainer tells its loggers in order, those of `report_to` before the callbacks of the user, so a
callback that is merely added speaks too late. `monitor_trainer` puts it first: the scalars are in
the Trainer's own logs when TensorBoard, Weights & Biases and the others read them.
"""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from tieline.analysis.monitor import RoutingMonitor
from tieline.core.errors import require


class RoutingCallback(TrainerCallback):
    """Runs a `RoutingMonitor` in a Trainer.

    Args:
        every: steps between two logged ones; by default the Trainer's `logging_steps`. Steps that
            the monitor logs are logged by the Trainer too.
        options: further arguments of `RoutingMonitor`.
    """

    def __init__(self, every: int | None = None, **options: Any) -> None:
        require(every is None or every >= 1, f"need every >= 1 steps, got {every}")
        self.every, self._options = every, options
        self.monitor: RoutingMonitor | None = None
        self._ready: dict[str, float] = {}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Find the model's routers."""
        require(model is not None, "the Trainer gave its callback no model to watch")
        assert model is not None
        self.every = self.every or max(1, int(args.logging_steps))
        self.monitor = RoutingMonitor(model, every=self.every, **self._options)
        self.monitor.disarm()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch the step if it will be logged; steps count from 1 when they have ended."""
        if self.monitor is not None and (state.global_step + 1) % self.monitor.every == 0:
            self.monitor.arm()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compute the scalars and make the Trainer log them."""
        if self.monitor is not None and state.global_step % self.monitor.every == 0:
            self._ready = dict(self.monitor.read(state.global_step))
            control.should_log = control.should_log or bool(self._ready)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Join the scalars to the Trainer's log and its history."""
        if logs is not None and self._ready:
            logs.update(self._ready)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(self._ready)
            self._ready = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks off."""
        if self.monitor is not None:
            self.monitor.close()


def monitor_trainer(trainer: Any, every: int | None = None, **options: Any) -> RoutingCallback:
    """Put a `RoutingCallback` before the loggers of a Trainer, so that all of them see its scalars.

    Args:
        trainer: a `transformers.Trainer`.
        every: see `RoutingCallback`.
        options: further arguments of `RoutingMonitor`.
    """
    callback = RoutingCallback(every, **options)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
