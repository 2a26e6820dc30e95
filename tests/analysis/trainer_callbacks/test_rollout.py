"""The doors of trainers: transformers' own Trainer, and TRL's where it is installed."""

import warnings

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.models.tiny import lively, tiny_model
from tieline.analysis.rollout import RolloutMismatch
from tieline.analysis.trainer_callbacks import RolloutCallback, RolloutReplay
from tieline.core.errors import ParameterError
from tieline.models.capture import capture
from tieline.models.demo import load_demo_model, load_demo_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(model):
    model.requires_grad_(True)
    return model.train()


def test_a_callback_logs_the_mismatch(tmp_path):
    model = trained(lively(tiny_model("mixtral")))
    ids = torch.randint(3, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), capture(model, ranks=1, epsilons=(), distances=False) as recorder:
        model(input_ids=ids)
    routes, mismatch = recorder.trace(), RolloutMismatch(model)

    class Watched(Trainer):
        def training_step(self, *args, **kwargs):
            with mismatch.watch(routes):
                return super().training_step(*args, **kwargs)

    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Watched(model, arguments, train_dataset=rows)
    trainer.callback_handler.callbacks.insert(0, RolloutCallback(mismatch))
    trainer.train()
    steps = [log for log in trainer.state.log_history if "rollout/flip_rate" in log]
    assert len(steps) == 2
    assert all(log["rollout/flip_rate"] == log["rollout/unrecorded"] == 0 for log in steps)
    assert all(log["rollout/tokens"] == 64 for log in steps)


def test_a_callback_needs_a_mismatch(no_axis_checks):
    with pytest.raises(ParameterError, match="RolloutMismatch"):
        RolloutCallback(None)


def test_grpo_of_trl_records_replays_and_logs(tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")

    class GRPO(RolloutReplay, trl.GRPOTrainer): ...

    tokenizer = load_demo_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    arguments = trl.GRPOConfig(
        str(tmp_path),
        max_steps=2,
        logging_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = GRPO(
        model=load_demo_model(),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["def f(x):", "import os"] * 4}),
        processing_class=tokenizer,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    steps = [log for log in trainer.state.log_history if "rollout/flip_rate" in log]
    assert len(steps) == 2
    for log in steps:
        assert log["rollout/unexplained_max"] == 0
        assert log["rollout/shifted_documents"] == log["rollout/exchanged_documents"] == 0
        assert log["rollout/unrecorded"] < 0.5
