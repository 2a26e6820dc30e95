"""Routes in files of torch.save: plain tensors, read without running code that is in the file.

    a tensor (tokens, k) or (tokens, layers, k)
    a mapping or list of tensors (tokens, k), one per layer; keys hold the number of the layer
    a mapping with the names of an array file (routed_experts, tokens, ...)
    a folder of .pt files, one per layer, each a tensor or a mapping with ids and weights

`torch.load(weights_only=True)` builds tensors and containers alone. A file that needs more is a
pickle, and is refused by name. Sizes are those of the file: a tensor that claims more elements than
its storage holds is refused.
"""

import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tieline.core.errors import TraceError, parsing, require
from tieline.trace.readers.arrays import NAMES, array_routes
from tieline.trace.readers.decoding import MOST_BYTES, NPY_MAGIC
from tieline.trace.readers.logs import COLUMNS
from tieline.trace.readers.routes import Routes
from tieline.trace.record import MOST_LAYERS

TENSORS = "*.pt"
PICKLES = (".pt", ".pth", ".pkl", ".pickle")
IDS = (*COLUMNS["experts"], "ids", "top_k_ids", "top_indices")
WEIGHTS = (*COLUMNS["weights"], "scores")


class _TorchLayer(NamedTuple):
    """One layer of a file.

    Attributes:
        name: key or file that it was read from.
        ids: chosen experts (tokens, k).
        weights: combine weights (tokens, k), or None.
    """

    name: str
    ids: np.ndarray
    weights: np.ndarray | None


def refuse_pickle(file: Path, head: bytes) -> None:
    """Refuse a file that only a pickle reader could read."""
    arrays = head[:6] == NPY_MAGIC or head[8:9] == b"{"
    pickled = file.suffix.lower() in PICKLES and not arrays
    pickled |= head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    pickled |= head[:2] == b"PK" and not pickled and is_torch_file(file)
    require(not pickled, _pickle_message(file), TraceError)


def _pickle_message(file: Path) -> str:
    """Say that a file is a pickle, and what to save instead."""
    return (
        f"{file}: is a pickle that holds more than plain tensors (as the expert recorder of SGLang "
        "writes it), and reading one runs code that is in the file. Where it was made, save the "
        "array instead: np.savez('routes.npz', routed_experts=array)"
    )


def is_torch_file(file: Path) -> bool:
    """Return whether a file is an archive of torch.save."""
    with parsing(file), file.open("rb") as stream:  # is_zipfile raises for archives on two disks
        if stream.read(2) != b"PK" or not zipfile.is_zipfile(file):
            return False
    with parsing(file), zipfile.ZipFile(file) as archive:
        return any(name.endswith("data.pkl") for name in archive.namelist())


def torch_routes(path: str | Path) -> Routes:
    """Read the routes in a .pt file of tensors, or in a folder of one file per layer."""
    place = Path(path)
    if not place.is_dir():
        return _torch_value_routes(_loaded_tensors(place), str(place))
    files = sorted(place.glob(TENSORS), key=lambda file: (_last_number(file.stem), file.name))
    require(0 < len(files) <= MOST_LAYERS, f"{place}: {len(files)} files {TENSORS}", TraceError)
    layers = [_torch_layer(_loaded_tensors(file), str(file)) for file in files]
    return _stacked_torch_layers(layers, str(place), [file.stem for file in files])


def _last_number(name: str) -> int:
    """The last number in a name; names without one come last."""
    digits = re.findall(r"\d{1,9}", name)
    return int(digits[-1]) if digits else 1 << 30


def _loaded_tensors(file: Path) -> Any:
    """The tensors of a file, without running code of it."""
    require(is_torch_file(file), _pickle_message(file), TraceError)
    with parsing(file), zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    size = sum(member.file_size for member in members)
    fits = not packed and size <= min(MOST_BYTES, file.stat().st_size)
    require(fits, f"{file}: states {size} bytes in {file.stat().st_size}", TraceError)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a hostile archive makes the reader raise
        raise TraceError(_pickle_message(file)) from error


def _stored_array(tensor: Any, label: str) -> np.ndarray:
    """The numbers of a tensor that its storage holds."""
    require(
        isinstance(tensor, torch.Tensor), f"{label}: needs a tensor, got {tensor!r:.40}", TraceError
    )
    dense = tensor.layout == torch.strided and not tensor.is_quantized
    size = tensor.numel() * tensor.element_size()
    held = dense and size <= tensor.untyped_storage().nbytes()
    require(
        held, f"{label}: a tensor of {tuple(tensor.shape)} that is not stored whole", TraceError
    )
    plain = tensor.detach()
    return (plain.float() if plain.is_floating_point() else plain).numpy()


def _torch_value_routes(value: Any, name: str) -> Routes:
    """Routes of what a .pt file holds."""
    if isinstance(value, torch.Tensor):
        ids = _stored_array(value, name)
        return replace(
            array_routes({NAMES[0]: ids[:, None] if ids.ndim == 2 else ids}, name), producer="torch"
        )
    if isinstance(value, Mapping) and any(key in value for key in NAMES):
        arrays = {
            str(key): _stored_array(item, f"{name}: {key!s:.40}")
            for key, item in value.items()
            if isinstance(item, torch.Tensor)
        }
        return replace(array_routes(arrays, name), producer="torch")
    if isinstance(value, Mapping) and any(key in value for key in IDS):
        return _stacked_torch_layers([_torch_layer(value, name)], name, ["0"])
    items = list(value.items()) if isinstance(value, Mapping) else None
    if isinstance(value, list | tuple):
        items = [(number, item) for number, item in enumerate(value)]
    if not items or len(items) > MOST_LAYERS:
        kind = type(value).__name__
        raise TraceError(f"{name}: need tensors of expert ids, one per layer, got {kind}")
    if all(_last_number(str(key)) < 1 << 30 for key, _ in items):
        items.sort(key=lambda item: _last_number(str(item[0])))
    layers = [_torch_layer(item, f"{name}: {key!s:.40}") for key, item in items]
    return _stacked_torch_layers(layers, name, [str(key) for key, _ in items])


def _torch_layer(value: Any, label: str) -> _TorchLayer:
    """Ids and weights of one layer: a tensor, or a mapping that names them."""
    weights = None
    if isinstance(value, Mapping):
        key = next((name for name in IDS if name in value), None)
        if key is None:
            raise TraceError(f"{label}: no field of experts among {list(value)[:6]!r:.120}")
        weights = next(
            (_stored_array(value[x], f"{label}: {x}") for x in WEIGHTS if x in value), None
        )
        value, label = value[key], f"{label}: {key}"
    ids = _stored_array(value, label)
    fits = ids.ndim == 2 and ids.dtype.kind in "iu"
    require(
        fits, f"{label}: needs integers (tokens, k), got {ids.dtype} of {ids.shape}", TraceError
    )
    return _TorchLayer(
        label, ids, weights if weights is not None and weights.shape == ids.shape else None
    )


def _stacked_torch_layers(layers: list[_TorchLayer], name: str, keys: list[str]) -> Routes:
    """Routes of layers of one shape."""
    shape = layers[0].ids.shape
    for layer in layers:
        require(
            layer.ids.shape == shape,
            f"{layer.name}: (tokens, k) is {layer.ids.shape}, the first layer has {shape}",
            TraceError,
        )
    weights = [layer.weights for layer in layers if layer.weights is not None]
    numbers = [_last_number(key) for key in keys]
    named = len(set(numbers)) == len(numbers) and max(numbers) < 1 << 30
    return Routes(
        np.stack([layer.ids for layer in layers], 1),
        "torch",
        name,
        weights=np.stack(weights, 1) if len(weights) == len(layers) else None,
        layer_names=tuple(f"layers.{n}" for n in numbers) if named else tuple(keys),
        notes=(f"took {', '.join(keys[:4])}{', ...' * (len(keys) > 4)} for the layers",),
    )
