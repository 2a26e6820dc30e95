"""Monitor and rollout mismatch in trainers: callbacks for transformers and a mixin for TRL.

    trainer = Trainer(model, args, train_dataset=data)
    monitor_trainer(trainer, every=10)                 # scalars of a `RoutingMonitor`
    trainer.train()

    class Trainer(RolloutReplay, GRPOTrainer): ...     # records at rollout, replays in the update
    trainer = Trainer(model=model, reward_funcs=reward, args=args, train_dataset=data)

A Trainer calls its loggers in order, those of `report_to` before the callbacks of the user, so the
scalars of a callback that is added last come too late. `monitor_trainer` puts it first: the scalars
are in the Trainer's own logs when TensorBoard, Weights & Biases and others read them.

The mixin wraps methods of TRL's trainers: `_generate` (the rollout), `training_step`,
`compute_loss` and `_get_per_token_logps_and_entropies` (the update) and `log`. Routes of a rollout
are kept until the next rollout, so that a trainer may shuffle its rows and use them several times:
documents are matched by their tokens. A trainer without rollouts, such as SFT, uses the routes in
its attribute `routes`.
"""

import warnings
from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import TrainerCallback

from tieline.analysis.monitor import RoutingMonitor
from tieline.analysis.rollout import RolloutMismatch
from tieline.core.errors import require
from tieline.models.capture import capture
from tieline.models.replay import ReplayWarning, replay


class _ScalarCallback(TrainerCallback):
    """Adds scalars to the logs of a Trainer."""

    def pop_scalars(self) -> dict[str, float]:
        """Return the scalars since the last log."""
        raise NotImplementedError

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the scalars to the Trainer's log and its history."""
        scalars = {} if logs is None else self.pop_scalars()
        if logs is not None and scalars:
            logs.update(scalars)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(scalars)


class RoutingCallback(_ScalarCallback):
    """Runs a `RoutingMonitor` in a Trainer, over the tokens of all ranks.

    Args:
        every: number of steps from one logged step to the next; by default the Trainer's
            `logging_steps`. The Trainer also logs on the steps that the monitor logs.
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
        """Create the monitor of the model's routers."""
        require(model is not None, "the Trainer gave its callback no model to watch")
        assert model is not None
        self.every = self.every or max(1, int(args.logging_steps))
        options: dict[str, Any] = {"over_ranks": True} | self._options
        self.monitor = RoutingMonitor(model, every=self.every, **options)
        self.monitor.disarm()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Arm the monitor if the step will be logged; finished steps are counted from 1."""
        if self.monitor is not None and (state.global_step + 1) % self.monitor.every == 0:
            self.monitor.arm()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compute the scalars and make the Trainer log them."""
        if self.monitor is not None and state.global_step % self.monitor.every == 0:
            self._ready = dict(self.monitor.read(state.global_step))
            control.should_log = control.should_log or bool(self._ready)

    def pop_scalars(self) -> dict[str, float]:
        """Return the scalars of the last monitored step, once."""
        scalars, self._ready = self._ready, {}
        return scalars

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hooks."""
        if self.monitor is not None:
            self.monitor.close()


def monitor_trainer(trainer: Any, every: int | None = None, **options: Any) -> RoutingCallback:
    """Add a `RoutingCallback` before the loggers of a Trainer, so that all of them get its scalars.

    Args:
        trainer: a `transformers.Trainer`.
        every: see `RoutingCallback`.
        options: further arguments of `RoutingMonitor`.
    """
    callback = RoutingCallback(every, **options)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


class RolloutReplay:
    """Mixin for TRL trainers: records routes at rollout, replays and compares them in the update.

    Routes are replayed from the forward pass of a training step to the end of its backward pass,
    in which activation checkpointing repeats the routers, and in the log-probabilities of the
    policy before its update. Evaluation and the reference model use their live routers.

    Attributes:
        routes: recorded routes of the rows in training; set by a rollout with transformers, by a
            `rollout_func` that calls another engine, or by hand.
        replay_routes: whether the update uses the recorded experts; else they are only compared.
        mismatch: the comparison, created in the first update.
    """

    routes: Any = None
    replay_routes: bool = True
    mismatch: RolloutMismatch | None = None
    _step_contexts: ExitStack | None = None
    _is_replaying: bool = False

    @property
    def _routed_model(self) -> nn.Module:
        """The model inside any adapters, because `generate` calls it without the wrapper."""
        model = self.model  # type: ignore[attr-defined]
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Record the routes of a training rollout if the model itself generates."""
        is_external = getattr(self, "rollout_func", None) or getattr(self, "use_vllm", False)
        if is_external or not self.model.training:  # type: ignore[attr-defined]
            return super()._generate(*args, **kwargs)  # type: ignore[misc]
        with capture(self._routed_model, ranks=1, epsilons=(), distances=False) as recorder:
            output = super()._generate(*args, **kwargs)  # type: ignore[misc]
        self.routes = recorder.trace()
        return output

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Replay in the log-probabilities of the policy before its update."""
        with ExitStack() as stack:
            if model is self.model and model.training and not _is_reference(model):  # type: ignore[attr-defined]
                self._enter_replay(stack)
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step and close the contexts that `compute_loss` enters."""
        with ExitStack() as self._step_contexts:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Replay and compare the routes until the training step ends."""
        if self.routes is not None and model.training and self._step_contexts is not None:
            if self.mismatch is None:
                self.mismatch = RolloutMismatch(self._routed_model)
            self._enter_replay(self._step_contexts)
            self._step_contexts.enter_context(self.mismatch.watch(self.routes))
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _enter_replay(self, stack: ExitStack) -> None:
        """Replay until the stack is closed, unless a replay is already active."""
        if not self.replay_routes or self.routes is None or self._is_replaying:
            return
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ReplayWarning)  # `unrecorded` counts them
        stack.enter_context(replay(self._routed_model, self.routes, match="tokens"))
        self._is_replaying = True
        stack.callback(setattr, self, "_is_replaying", False)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the mismatch of the steps since the last log to the logs."""
        if self.mismatch is not None and self.model.training:  # type: ignore[attr-defined]
            logs = {**logs, **self.mismatch.step()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def _is_reference(model: Any) -> bool:
    """Return whether a model with adapters runs as the reference: without them, or with "ref"."""
    if not hasattr(model, "get_base_model"):
        return False
    return bool(model._adapters_disabled) or model.active_adapter == "ref"


class RolloutCallback(_ScalarCallback):
    """Adds the scalars of a `RolloutMismatch` to the logs of a transformers Trainer.

    Put it before the Trainer's loggers: `trainer.callback_handler.callbacks.insert(0, callback)`.

    Args:
        mismatch: the comparison; the training step must run inside its `watch`.
    """

    def __init__(self, mismatch: RolloutMismatch) -> None:
        require(isinstance(mismatch, RolloutMismatch), "a RolloutMismatch is needed")
        self.mismatch = mismatch

    def pop_scalars(self) -> dict[str, float]:
        """Return the scalars of the steps since the last log."""
        return self.mismatch.step()
