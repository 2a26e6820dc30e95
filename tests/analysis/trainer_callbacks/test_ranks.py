"""Two processes of a Trainer log the numbers of one: the monitor and the mismatch of a rollout."""

import os
import socket

import pytest
import torch
from torch import multiprocessing
from transformers import PrinterCallback, Trainer, TrainingArguments

from tests.models.tiny import lively, tiny_model
from tieline.analysis.rollout import RolloutMismatch
from tieline.analysis.trainer_callbacks import RolloutCallback, monitor_trainer
from tieline.models.capture import capture
from tieline.models.emulate import emulate

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def logged_scalars(folder, rows_per_rank):
    """Scalars of the routing and the rollout that one step of a Trainer logs."""
    model = lively(tiny_model("olmoe")).requires_grad_(True).train()
    ids = torch.randint(3, 64, (8, 12), generator=torch.Generator().manual_seed(0))
    with (
        torch.no_grad(),
        emulate(model, "bf16", "all"),
        capture(model, ranks=1, epsilons=(), distances=False) as recorder,
    ):
        model(input_ids=ids)
    routes, mismatch = recorder.trace(), RolloutMismatch(model, limits=None)

    class Watched(Trainer):
        def training_step(self, *args, **kwargs):
            with mismatch.watch(routes):
                return super().training_step(*args, **kwargs)

    arguments = TrainingArguments(
        str(folder),
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=rows_per_rank,
        learning_rate=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Watched(model, arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.callback_handler.callbacks.insert(0, RolloutCallback(mismatch))
    monitor_trainer(trainer, check_losses=False)
    trainer.train()
    (log,) = [log for log in trainer.state.log_history if "rollout/tokens" in log]
    return {key: value for key, value in log.items() if key.startswith(("rollout/", "routing/"))}


def one_rank(rank, folder, port, results):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    results[rank] = logged_scalars(folder, 4)
    torch.distributed.destroy_process_group()


def test_two_ranks_of_a_trainer_log_the_numbers_of_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(one_rank, (str(tmp_path), port, results), nprocs=2)
        by_rank = dict(results)
    expected = logged_scalars(tmp_path, 8)
    assert expected["rollout/tokens"] == 96
    assert expected["rollout/flip_rate"] > 0
    for scalars in by_rank.values():
        assert scalars == pytest.approx(expected, rel=1e-5)
        exact = [key for key in expected if key.startswith("rollout/")]
        assert all(scalars[key] == expected[key] for key in exact)
