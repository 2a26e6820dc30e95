"""Weights saved with a change are known by a tensor, also where config.json lost the record.

A plain model ignores one tensor more without an error; converters to other formats, which must name
every tensor, stop at it.
"""

import json
import struct
from pathlib import Path

from tieline.core.errors import UnsupportedModelError
from tieline.serving.modeling_tieline import MARKER

MOST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, as its own library limits them."""


def refuse_stripped(folder: Path) -> None:
    """Refuse a folder whose weights were changed and whose configuration lost the record."""
    for path in sorted(folder.glob("*.safetensors")):
        if MARKER in tensor_names(path):
            raise UnsupportedModelError(
                f"{path.name} holds the tensor {MARKER!r}: the weights of a model that Tieline "
                "changed, but config.json has lost the record of it, so that they would run as "
                "another model; take the config.json that was saved with them"
            )


def tensor_names(path: Path) -> set[str]:
    """Return the names of the tensors of a safetensors file; empty for a malformed one."""
    with path.open("rb") as file:
        size = file.read(8)
        if len(size) < 8 or not 0 < struct.unpack("<Q", size)[0] < MOST_HEADER:
            return set()
        try:
            return set(json.loads(file.read(struct.unpack("<Q", size)[0])))
        except ValueError:
            return set()
