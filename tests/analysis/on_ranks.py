"""Work that tests give to ranks."""

import torch

from tieline.analysis.inspect import inspect


def inspected(parallel, tokens=1536):
    """Metrics, jumps, and experts and scores of every layer, of three batches of the demo model."""
    torch.set_num_threads(1)
    found = inspect(tokens=tokens, batch_size=1, parallel=parallel, noise=False)
    layers = [(layer.experts, layer.scores) for layer in found.trace.layers]
    return found.metrics, found.jumps, layers
