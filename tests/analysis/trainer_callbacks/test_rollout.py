"""The rollout callback of transformers' own Trainer."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.models.tiny import lively, tiny_model
from tieline.analysis.rollout import RolloutMismatch
from tieline.analysis.trainer_callbacks import RolloutCallback
from tieline.core.errors import ParameterError
from tieline.models.capture import capture

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
