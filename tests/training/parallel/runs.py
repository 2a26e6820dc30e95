"""Whole runs small enough for a test: a decoder on bytes of the text in the box."""

import os
import signal

import torch
import torch.distributed as dist

from tieline.hf.demo import demo_text, load_demo_model
from tieline.training.config import DataConfig, DecoderConfig, OptimConfig, TrainConfig, gate_config
from tieline.training.parallel.capture import summarise_on_ranks, trace_on_ranks
from tieline.training.parallel.run import run_on_ranks
from tieline.training.text_data import STREAMS, TextStreams, Windows, byte_tokenizer

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
    whole = TrainConfig(
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
    return whole.replace(**changes)


def run_here(configuration, folder, options):
    """`run_on_ranks` as a task; the record of rank 0."""
    result = run_on_ranks(configuration, folder, **options)
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


def captured(sequences, what):
    """Trace or summary of the demo model, from all ranks."""
    torch.set_num_threads(1)
    make = {"trace": trace_on_ranks, "summary": summarise_on_ranks}[what]
    # one sequence at a time: the products of a larger batch may round otherwise
    return make(load_demo_model(), sequences, batch_size=1)
