"""Saving a streamed model that was smoothed: its files without a copy of the weights.

StreamedModel(stream).save_pretrained(folder)
"""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tieline.core.errors import require
from tieline.models.changes import VARIANT
from tieline.models.precision import stored_in
from tieline.models.shards import FetchedShards
from tieline.models.streaming import ModelStream


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
