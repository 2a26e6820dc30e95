"""Complete runs small enough for a test, and comparisons of two runs."""

import json
import os
import signal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tieline.lab.training.checkpoint import last_checkpoint
from tieline.lab.training.config import (
    DataConfig,
    DecoderConfig,
    OptimConfig,
    TrainConfig,
    gate_config,
)
from tieline.lab.training.text_data import STREAMS, TextStreams, byte_tokenizer
from tieline.lab.training.trainer import RoutingTrainer
from tieline.lab.training.training_run import run_parallel
from tieline.models.demo import demo_text

BYTES = 2000
CLOSE = 1e-5


def _box():
    ids = torch.tensor(list(demo_text().encode()[: 3 * BYTES]), dtype=torch.int32)
    return TextStreams(*ids.split(BYTES), byte_tokenizer(), "bytes of the text in the box")


STREAMS["box"] = _box


def config(gate="smooth1", **changes):
    """Six steps of two micro-batches of six rows, two layers, a checkpoint every second step."""
    shape = DecoderConfig(
        layers=2, d_model=16, d_hidden=12, heads=2, vocabulary=256, context=12, n_experts=4
    )
    run = TrainConfig(
        recipe="test",
        task="language",
        model=shape,
        gate=gate_config(gate),
        data=DataConfig(name="box"),
        optim=OptimConfig(steps=6, batch=12, accumulate=2, warmup=2),
        log_every=1,
        checkpoint_every=2,
        evaluate_items=4,
    )
    return run.replace(**changes)


def run_here(configuration, folder, options):
    """`run_parallel` as a task; the record of rank 0."""
    result = run_parallel(configuration, folder, **options)
    return None if result is None else result.to_dict()


def run_and_lose(configuration, folder, options, how, step):
    """`run_here`, but rank 1 is killed or stopped as it begins a step, counted from 0."""
    if dist.get_rank() == 1:
        plain = RoutingTrainer.training_step

        def lose(trainer, *args):
            if trainer.state.global_step >= step:
                os.kill(os.getpid(), getattr(signal, how))
            return plain(trainer, *args)

        RoutingTrainer.training_step = lose
    return run_here(configuration, folder, options)


def losses(result):
    return [(e["step"], e["task_loss"]) for e in result["history"] if "task_loss" in e]


def assert_same_losses(summary, plain):
    assert [step for step, _ in losses(summary)] == [step for step, _ in losses(plain)]
    for (_, mine), (_, theirs) in zip(losses(summary), losses(plain), strict=True):
        assert mine == pytest.approx(theirs, abs=CLOSE)


def assert_same_tensors(path, plain):
    mine, theirs = load_file(path), load_file(plain)
    assert {name: (t.shape, t.dtype) for name, t in mine.items()} == {
        name: (t.shape, t.dtype) for name, t in theirs.items()
    }
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).abs().max() <= CLOSE, name


def assert_same_scores(summary, plain):
    for split in ("validation", "test"):
        mine, theirs = (result["scores"][split]["loss"] for result in (summary, plain))
        assert mine == pytest.approx(theirs, abs=CLOSE)


def assert_same_files(run_folder, plain):
    """The newest checkpoints and the trained models of two folders."""
    mine, theirs = last_checkpoint(run_folder), last_checkpoint(plain)
    assert mine.name == theirs.name
    checkpoints = [{p.name for p in f.glob("checkpoint-*")} for f in (run_folder, plain)]
    assert checkpoints[0] == checkpoints[1]
    assert {p.name for p in mine.iterdir()} == {p.name for p in theirs.iterdir()}
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(mine / name, theirs / name)
    for name in ("config.json", "complete.json"):
        assert json.loads((mine / name).read_text()) == json.loads((theirs / name).read_text())
    assert_same_tensors(*(folder / "model" / "model.safetensors" for folder in (run_folder, plain)))
