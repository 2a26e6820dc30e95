"""Whole runs small enough for a test: a decoder on bytes of the text in the box."""

import ctypes
import gc
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tieline.lab.training.config import (
    DataConfig,
    DecoderConfig,
    OptimConfig,
    TrainConfig,
    gate_config,
)
from tieline.lab.training.parallel.checkpoint import (
    named_moments,
    named_weights,
    read_shards,
    write_shards,
)
from tieline.lab.training.parallel.experts import parallelize_, rank_mesh
from tieline.lab.training.parallel.run import run_parallel
from tieline.lab.training.text_data import STREAMS, TextStreams, Windows, byte_tokenizer
from tieline.models.demo import demo_text

BYTES = 2000


def _box():
    ids = torch.tensor(list(demo_text().encode()[: 3 * BYTES]), dtype=torch.int32)
    return TextStreams(*ids.split(BYTES), byte_tokenizer(), "bytes of the text in the box")


STREAMS["box"] = _box


def config(gate="smooth1", **changes):
    """Six steps of two micro-batches of three rows, two layers, a checkpoint every second step."""
    shape = DecoderConfig(
        layers=2, d_model=16, d_hidden=12, heads=2, vocabulary=256, context=12, n_experts=4
    )
    run = TrainConfig(
        recipe="test",
        task="language",
        model=shape,
        gate=gate_config(gate),
        data=DataConfig(name="box"),
        optim=OptimConfig(steps=6, batch=6, accumulate=2, warmup=2),
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
    """`run_here`, but rank 1 is lost when it reads the first row of a step: killed, or silent."""
    if dist.get_rank() == 1:
        first = step * configuration.optim.batch
        plain = Windows.__getitem__

        def lose(windows, index):
            if index >= first:
                os.kill(os.getpid(), getattr(signal, how))
            return plain(windows, index)

        Windows.__getitem__ = lose
    return run_here(configuration, folder, options)


def peaks(folder):
    """Bytes of this rank's state, and what writing and reading its shards took beyond them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(24)))
    parallelize_(model, rank_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tensors = named_weights(model) | named_moments(optimizer)
    held = sum(
        t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors.values()
    )
    written = _beyond(lambda: write_shards(folder, tensors))
    return held, written, _beyond(lambda: read_shards(folder, tensors))


def _beyond(work):
    """Resident bytes at the peak of some work, beyond those before it."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))
