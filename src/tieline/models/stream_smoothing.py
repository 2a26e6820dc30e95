"""Smoothing a model that is streamed: its scores from one pass, and its files without a copy.

measured = stream_scores(stream, plans, batches, "router bf16")
record = smooth_(stream.model, budget=8.5, measured=measured)
StreamedModel(stream).save_pretrained(folder)
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tieline.core.errors import require
from tieline.models.changes import VARIANT
from tieline.models.emulate import rounded_products
from tieline.models.precision import stored_in
from tieline.models.router_call import attach, detach
from tieline.models.running import forward, only_running
from tieline.models.shards import FetchedShards
from tieline.models.smooth_calibration import Measured, Scores, gap_noise, precision_named
from tieline.models.smooth_router import LayerPlan
from tieline.models.stream_rounding import StreamRounding
from tieline.models.streaming import ModelStream

Ids = Int[Tensor, "_ _"]
Told = Callable[[int, int], None]


def stream_scores(
    stream: ModelStream,
    plans: Sequence[LayerPlan],
    batches: Sequence[Ids],
    noise: str | None,
    told: Told | None = None,
) -> Measured:
    """Selection scores of every router, and σ of its gap, from one read of the weights.

    Args:
        stream: what runs the model.
        plans: its routers.
        batches: token ids.
        noise: precision whose noise is measured beside the clean run; None for none.
        told: called with the bytes read so far and those of the whole.
    """
    model, clean = stream.model, {plan.name: Scores(plan) for plan in plans}
    noisy = {plan.name: Scores(plan) for plan in plans}
    jobs = [partial(_run, stream, ids) for ids in batches]
    scopes = [partial(_watched, plans, clean)] * len(jobs)
    settings: list[Any] = [None] * len(jobs)
    if noise is not None:
        name, parts = precision_named(noise)

        @contextmanager
        def rounding() -> Iterator[None]:
            with rounded_products(model, name, parts), _watched(plans, noisy):
                yield

        scopes += [rounding] * len(jobs)
        settings += [partial(StreamRounding(stream).rounded, name, parts)] * len(jobs)
        jobs = jobs * 2
    with only_running(model):
        stream.run(jobs, scopes=scopes, settings=settings, told=told, head=False)
    return Measured(clean, {} if noise is None else gap_noise(plans, clean, noisy))


def _run(stream: ModelStream, ids: Ids) -> None:
    forward(stream.model, ids)


@contextmanager
def _watched(plans: Sequence[LayerPlan], handlers: Mapping[str, Scores]) -> Iterator[None]:
    with ExitStack() as stack:
        for plan in plans:
            attach(plan.router, plan.family, handlers[plan.name])
            stack.callback(detach, plan.router)
        yield


class StreamedModel:
    """A streamed model that was changed in its configuration alone, to be saved.

    Its files are linked where the new folder is on the same disk, and copied elsewhere, in the
    precision that they are stored in.
    """

    def __init__(self, stream: ModelStream) -> None:
        """Save the model of this stream."""
        self._stream = stream

    def save_pretrained(self, folder: str | Path) -> None:
        """Write configuration, index and weights into a folder that is there."""
        model, shards = self._stream.model, self._stream.weights.shards
        kept = not isinstance(shards, FetchedShards) or shards.keep
        require(kept, "the files of the model were dropped (--no-keep): it cannot be saved")
        config: Any = copy.deepcopy(model.config)
        config.dtype = stored_in(model) or config.dtype
        config.architectures = config.architectures or [type(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        files = sorted({stored.file for stored in shards.tensors.values()})
        names = {file: _name(number, len(files)) for number, file in enumerate(files, 1)}
        for file, name in names.items():
            _link(shards.path(file).resolve(), Path(folder) / name)
        if len(files) > 1:
            weight_map = {tensor: names[stored.file] for tensor, stored in shards.tensors.items()}
            index = {"metadata": {"total_size": shards.size}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (Path(folder) / f"model.safetensors.index.{VARIANT}.json").write_text(text)


def _name(number: int, count: int) -> str:
    if count == 1:
        return f"model.{VARIANT}.safetensors"
    return f"model.{VARIANT}-{number:05d}-of-{count:05d}.safetensors"


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
