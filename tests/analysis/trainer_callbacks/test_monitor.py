"""The callback in the Trainer's own order of events."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from tests.models.tiny import batch, tiny_model
from tieline.analysis.trainer_callbacks import RoutingCallback, monitor_trainer
from tieline.core.errors import TielineError
from tieline.models.capture import capture
from tieline.models.replay import replay
from tieline.trace.record import RoutingTrace


class Logger(TrainerCallback):
    """Stands for TensorBoard and others of `report_to`, which come before a user's callbacks."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


class FakeTrainer:
    """The events of a Trainer, in its order, without its machinery (which needs accelerate)."""

    def __init__(self, model, logger, logging_steps):
        self.args = SimpleNamespace(logging_steps=logging_steps)
        self.model, self.state, self.control = model, TrainerState(), TrainerControl()
        self.callback_handler = CallbackHandler([DefaultFlowCallback, logger], model, *[None] * 3)

    def train(self, steps):
        events = self.callback_handler
        rest = self.args, self.state, self.control
        events.callbacks = [c for c in events.callbacks if type(c) is not DefaultFlowCallback]
        events.on_train_begin(*rest)
        for _ in range(steps):
            self.control._new_step()
            events.on_step_begin(*rest)
            self.model(input_ids=batch())
            self.state.global_step += 1
            events.on_step_end(*rest)
            if self.control.should_log or self.state.global_step % self.args.logging_steps == 0:
                self.log({"loss": 1.0})
        events.on_train_end(*rest)

    def log(self, logs):
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.callback_handler.on_log(self.args, self.state, self.control, logs)


@pytest.fixture
def model():
    return tiny_model("olmoe").train()


def test_every_logger_sees_the_scalars(model):
    logger = Logger()
    trainer = FakeTrainer(model, logger, logging_steps=4)
    monitor_trainer(trainer, every=2, check_losses=False)
    trainer.train(5)
    assert [step for step, _ in logger.logs] == [2, 4]
    for (_, logs), kept in zip(logger.logs, trainer.state.log_history, strict=True):
        assert logs["loss"] == 1.0
        assert "routing/gap_p1" in logs
        assert kept["routing/gap_p1"] == logs["routing/gap_p1"]
    assert not any(m._forward_hooks for m in model.modules())


def test_by_default_it_follows_the_logs_of_the_trainer(model):
    logger = Logger()
    trainer = FakeTrainer(model, logger, logging_steps=3)
    monitor_trainer(trainer, check_losses=False)
    trainer.train(7)
    assert [step for step, _ in logger.logs] == [3, 6]
    assert all("routing/ties" in logs for _, logs in logger.logs)


def test_scalars_are_logged_once(model):
    logger = Logger()
    trainer = FakeTrainer(model, logger, logging_steps=1)
    monitor_trainer(trainer, every=3, check_losses=False)
    trainer.train(4)
    assert ["routing/ties" in logs for _, logs in logger.logs] == [False, False, True, False]


def test_a_model_is_needed():
    with pytest.raises(TielineError, match="no model"):
        RoutingCallback().on_train_begin(SimpleNamespace(logging_steps=1), None, None)
    with pytest.raises(TielineError, match="every"):
        RoutingCallback(every=0)


def test_evaluation_between_steps_does_not_count(model):
    callback, state = RoutingCallback(every=1, check_losses=False), TrainerState()
    control = TrainerControl()
    callback.on_train_begin(SimpleNamespace(logging_steps=1), state, control, model=model)
    callback.on_step_begin(None, state, control)
    with torch.no_grad():
        model(input_ids=batch())
        model.eval()(input_ids=batch(5, 9))
        model.train()
    assert len(callback.monitor._calls["model.layers.0.mlp.gate"]) == 1
    callback.on_train_end(None, state, control)


@pytest.mark.parametrize("every", [None, 3])
def test_in_a_real_trainer(model, tmp_path, every):
    logger, rows = Logger(), [{"input_ids": row, "labels": row} for row in batch(2, 9).repeat(6, 1)]
    args = TrainingArguments(
        str(tmp_path),
        max_steps=6,
        logging_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model.requires_grad_(True), args, train_dataset=rows, callbacks=[logger])
    trainer.remove_callback(PrinterCallback)
    callback = monitor_trainer(trainer, every=every, check_losses=False)
    trainer.train()
    logged_steps = [step for step, logs in logger.logs if "routing/gap_p1" in logs]
    assert logged_steps == ([2, 4, 6] if every is None else [3, 6])
    kept = [entry["step"] for entry in trainer.state.log_history if "routing/gap_p1" in entry]
    assert kept == logged_steps
    assert callback.monitor.warnings == []
    assert not any(m._forward_hooks for m in model.modules())


def monitored(model, ids, record):
    """The scalars of one pass, with the experts of a record where there is one."""
    callback, control = RoutingCallback(every=1, check_losses=False), TrainerControl()
    state = TrainerState()
    callback.on_train_begin(SimpleNamespace(logging_steps=1), state, control, model=model)
    callback.on_step_begin(None, state, control)
    with replay(model, record, match="order") if record else nullcontext():
        model(input_ids=ids)
    state.global_step = 1
    callback.on_step_end(None, state, control)
    assert callback.monitor.warnings == []
    callback.on_train_end(None, state, control)
    return callback.pop_scalars()


def test_beside_replay_it_measures_live_scores_and_the_load_of_replayed_experts(model):
    ids = batch(4, 16)
    with torch.no_grad(), capture(model, ranks=1, epsilons=(), distances=False) as recorder:
        model(input_ids=ids)
    model_trace = recorder.trace()
    first = [
        type(layer)(layer.name, layer.facts, torch.tensor([[0, 1, 2]]).expand_as(layer.experts))
        for layer in model_trace.layers
    ]
    alone = monitored(model, ids, None)
    assert alone == monitored(model, ids, model_trace)
    forced = monitored(
        model,
        ids,
        RoutingTrace(first, model_trace.tokens, model_trace.documents, model_trace.positions),
    )
    experts, k = model_trace.layers[0].facts.n_experts, model_trace.layers[0].facts.k
    assert forced["routing/max_violation"] == pytest.approx(experts / k - 1)
    assert forced.keys() == alone.keys()
