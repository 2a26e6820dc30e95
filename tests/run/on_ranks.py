"""Tasks that tests run on several ranks."""

import json

import torch

from tieline.analysis.audit import audit
from tieline.analysis.diff import diff
from tieline.analysis.inspect import inspect
from tieline.analysis.smooth import smooth
from tieline.engines.engine_capture import capture_engine


def inspected(parallel, tokens=1536):
    """Metrics, jumps, and experts and scores of every layer, of three batches of the demo model."""
    torch.set_num_threads(1)
    result = inspect(tokens=tokens, batch_size=1, parallel=parallel, serve="none")
    return result.metrics, result.jumps, layers_of(result.trace)


def layers_of(trace):
    return [(layer.experts, layer.scores) for layer in trace.layers]


def captured(parallel, count):
    """Documents and layers of a capture of the demo model, `count` batches of eight documents."""
    torch.set_num_threads(1)
    result = capture_engine(tokens=count * 8 * 64, sequence_length=64, parallel=parallel)
    assert result.trace is not None
    return result.trace.documents, layers_of(result.trace), result.metrics


def compared(parallel, count, dtype="bf16", **options):
    """The record of a comparison of the demo model with itself in another precision."""
    torch.set_num_threads(1)
    options |= {"tokens": count * 128, "sequence_length": 128, "batch_size": 1}
    result = diff("demo", "demo", dtype_b=dtype, parallel=parallel, **options)
    return without_clock(result.to_dict())


def audited(parallel, count):
    """The record of an audit of the demo model, with formats of routers and model, and remedies."""
    torch.set_num_threads(1)
    result = audit(
        tokens=count * 128,
        sequence_length=128,
        batch_size=1,
        formats=["bf16", "int8"],
        flips=100,
        parallel=parallel,
    )
    return without_clock(result.to_dict())


def repaired(parallel, count, folder=None):
    """The record of smoothing the demo model; the first rank saves it if a folder is given."""
    torch.set_num_threads(1)
    sizes = {"tokens": count * 128, "calibration": 128, "batch_size": 1, "rounds": 2}
    result = smooth(**sizes, parallel=parallel)
    if folder is not None and (parallel is None or torch.distributed.get_rank() == 0):
        result.save(folder)
    return without_clock(result.to_dict())


CLOCK = {"timings", "latency", "time", "provenance"}


def without_clock(plain):
    """JSON values without times, and without what the record says about processes."""
    if isinstance(plain, dict):
        return {key: without_clock(value) for key, value in plain.items() if key not in CLOCK}
    if isinstance(plain, list | tuple):
        return [without_clock(value) for value in plain]
    return json.loads(json.dumps(plain))
