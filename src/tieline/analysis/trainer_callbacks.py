"""The monitor and the rollout mismatch inside trainers: callbacks of transformers, a mixin for TRL.

    trainer = Trainer(model, args, train_dataset=data)
    monitor_trainer(trainer, every=10)                 # scalars of a `RoutingMonitor`
    trainer.train()

    class Trainer(RolloutReplay, GRPOTrainer): ...     # records at rollout, replays in the update
    trainer = Trainer(model=model, reward_funcs=reward, args=args, train_dataset=data)

A Trainer tells its loggers in order, those of `report_to` before the callbacks of the user, so a
callback that is merely added speaks too late. `monitor_trainer` puts it first: the scalars are in
the Trainer's own logs when TensorBoard, Weights & Biases and the others read them.

The mixin wraps methods of TRL's trainers: `_generate` (the rollout), `training_step`,
`compute_loss` and `_get_per_token_logps_and_entropies` (the update) and `log`. Routes of a rollout
stay until the next one, so that a trainer may shuffle its rows and go over them several times:
documents are found by their tokens. A trainer without rollouts of its own, as SFT, takes those that
stand in its attribute `routes`.
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
    """Joins scalars to what a Trainer logs."""

    def ready_scalars(self) -> dict[str, float]:
        """Scalars since the last log."""
        raise NotImplementedError

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Join the scalars to the Trainer's log and its history."""
        scalars = {} if logs is None else self.ready_scalars()
        if logs is not None and scalars:
            logs.update(scalars)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(scalars)


class RoutingCallback(_ScalarCallback):
    """Runs a `RoutingMonitor` in a Trainer; its scalars are of the tokens of all ranks.

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
        options: dict[str, Any] = {"over_ranks": True} | self._options
        self.monitor = RoutingMonitor(model, every=self.every, **options)
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

    def ready_scalars(self) -> dict[str, float]:
        """Scalars of the last watched step, once."""
        scalars, self._ready = self._ready, {}
        return scalars

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


class RolloutReplay:
    """Mixin for trainers of TRL: records routes at rollout, replays and compares them later.

    Routes are replayed from the forward pass of a training step to the end of its backward pass,
    in which activation checkpointing repeats the routers, and in the log-probabilities of the
    policy before its update. Evaluation and the reference model go by their live routers.

    Attributes:
        routes: recorded routes of the rows in training; set by a rollout with transformers, by a
            `rollout_func` that asks another engine, or by hand.
        replay_routes: whether the update takes the recorded experts; else they are compared alone.
        mismatch: the comparison, made when the first update comes.
    """

    routes: Any = None
    replay_routes: bool = True
    mismatch: RolloutMismatch | None = None
    _step_contexts: ExitStack | None = None
    _is_replaying: bool = False

    @property
    def _routed_model(self) -> nn.Module:
        """The model inside of adapters, which `generate` calls without them around it."""
        model = self.model  # type: ignore[attr-defined]
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Record the routes of a rollout of training, where the model itself generates."""
        elsewhere = getattr(self, "rollout_func", None) or getattr(self, "use_vllm", False)
        if elsewhere or not self.model.training:  # type: ignore[attr-defined]
            return super()._generate(*args, **kwargs)  # type: ignore[misc]
        with capture(self._routed_model, ranks=1, epsilons=(), distances=False) as recorder:
            answer = super()._generate(*args, **kwargs)  # type: ignore[misc]
        self.routes = recorder.trace()
        return answer

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Replay in the log-probabilities of the policy before its update."""
        with ExitStack() as stack:
            if model is self.model and model.training and not _is_reference(model):  # type: ignore[attr-defined]
                self._enter_replay(stack)
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Leave at the end of the step what `compute_loss` enters."""
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
        """Replay until the stack is closed, unless a replay lasts already."""
        if not self.replay_routes or self.routes is None or self._is_replaying:
            return
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ReplayWarning)  # `unrecorded` counts them
        stack.enter_context(replay(self._routed_model, self.routes, match="tokens"))
        self._is_replaying = True
        stack.callback(setattr, self, "_is_replaying", False)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the numbers of the steps since the last log."""
        if self.mismatch is not None and self.model.training:  # type: ignore[attr-defined]
            logs = {**logs, **self.mismatch.step()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def _is_reference(model: Any) -> bool:
    """Whether a model with adapters runs as the reference: without them, or by those of "ref"."""
    if not hasattr(model, "get_base_model"):
        return False
    return bool(model._adapters_disabled) or model.active_adapter == "ref"


class RolloutCallback(_ScalarCallback):
    """Adds the numbers of a `RolloutMismatch` to what a transformers Trainer logs.

    Put it before the Trainer's loggers: `trainer.callback_handler.callbacks.insert(0, callback)`.

    Args:
        mismatch: the comparison, whose `watch` the training step enters.
    """

    def __init__(self, mismatch: RolloutMismatch) -> None:
        require(isinstance(mismatch, RolloutMismatch), "a RolloutMismatch is needed")
        self.mismatch = mismatch

    def ready_scalars(self) -> dict[str, float]:
        """Numbers of the steps since the last log."""
        return self.mismatch.step()
