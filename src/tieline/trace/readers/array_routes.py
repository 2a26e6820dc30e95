"""Routes in array files: npy, npz, safetensors, and plain tensors of torch.save.

    routed_experts            (tokens, layers, k), of vLLM, SGLang, TensorRT-LLM or other programs
    routed_experts            (sequences, length, layers, k), of verl (zeros where nothing was
                              written) and NeMo-RL (-1 where the live router shall choose)
    rollout_routed_experts    the same of slime and miles; also `rollout_routed_experts_0`, ..., an
                              array per sample
    routed_experts            (tokens, layers, 2k) of prime-rl: ids, bits of float32 weights
    routing_replay_out        (tokens, k) of FlashInfer: one layer
    moe_topk_indices.0, ...   (tokens, k) of each routed layer, as Megatron replays them
    layer_0, ...              (tokens, k) of each layer, under any names with its number; real
                              numbers of the same shape and layer are combine weights

The ids may have any name if they are the only array of three axes. A file may also have

    tokens, documents, positions   (tokens,)
    prompt_token_ids, token_ids    prompt and answer of one request (also `prompt` and `out`)
    input_ids, attention_mask      (sequences, length) of a batch
    weights                        combine weights, shape of the ids (also `topk_weights`)
    scores                         selection scores, (tokens, layers, k) of the chosen experts or
                                   (tokens, layers, E) of all (also `router_logits`)
    n_experts                      a number

A file of torch.save may hold

    a tensor (tokens, k) or (tokens, layers, k)
    a mapping or list of tensors (tokens, k), one per layer; keys contain the layer number
    a mapping with the names of an array file (routed_experts, tokens, ...)
    a folder of .pt files, one per layer, each a tensor or a mapping with ids and weights

`torch.load(weights_only=True)` builds tensors and containers only. A file that needs more is a
pickle and raises an error, as does a tensor that claims more elements than its storage holds.
"""

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tieline.core.errors import TraceError, naming_unparsable_file, require
from tieline.core.untrusted_input import MOST_BYTES, NPY_MAGIC, ROUTE_ARRAYS
from tieline.trace.readers.array_files import read_arrays
from tieline.trace.readers.logs import COLUMNS
from tieline.trace.readers.routes import Request, Routes, routes_of_requests, split_packed_weights
from tieline.trace.record import MOST_LAYERS, TOKEN_KEYS

ARRAY, ROLLOUT, _ = ROUTE_ARRAYS
WEIGHTS = ("weights", "topk_weights", "routing_weights")
SCORES = ("scores", "router_logits", "logits")
REQUEST_TOKENS = (("prompt_token_ids", "token_ids"), ("prompt", "out"), ("prompt", "output"))
"""Names of the arrays with the token ids of a request's prompt and answer."""

LEAST_SEQUENCES = 4
"""With k = 1, least number of sequences with zeros in their last rows only, from which on a zero
there is a missing row and not expert 0."""


def read_array_file(path: str | Path) -> Routes:
    """Read the routes in an npy, npz or safetensors file."""
    return array_routes(read_arrays(path), str(path))


def array_routes(arrays: Mapping[str, np.ndarray], name: str) -> Routes:
    """Find the routes among named arrays, with tokens, weights and scores beside them.

    Args:
        arrays: arrays by name.
        name: name of the routes in errors.
    """
    samples = _numbered_samples(arrays)
    if samples:
        requests = [Request(ids, tokens) for ids, tokens in samples]
        return routes_of_requests(requests, _rollout_producer([ids for ids, _ in samples]), name)
    layers = _stacked_layers(arrays, name)
    if layers is not None:
        return replace(_flat_routes(layers, arrays, name), producer="megatron")
    named = _layers_by_number(arrays, name)
    if named:
        tokens, documents, positions = (arrays.get(key) for key in TOKEN_KEYS)
        stacked = _stacked_torch_layers(
            named, name, [layer.name.rpartition(": ")[2] for layer in named]
        )
        return replace(
            stacked,
            producer="array",
            tokens=tokens,
            documents=documents,
            positions=positions,
            n_experts=_stated_experts(arrays),
        )
    key = _expert_array_name(arrays, name)
    ids = arrays[key]
    if key == "routing_replay_out" and ids.ndim == 2:
        ids = ids[:, None]
    if ids.ndim == 4:
        return batch_routes(ids, arrays, name, rollout=key == ROLLOUT)
    flat = _flat_routes(ids, arrays, name)
    return replace(flat, producer=_rollout_producer([ids])) if key == ROLLOUT else flat


def _flat_routes(ids: np.ndarray, arrays: Mapping[str, np.ndarray], name: str) -> Routes:
    """Return the routes of an array (tokens, layers, k)."""
    weights, scores = _first_named_array(arrays, WEIGHTS), _first_named_array(arrays, SCORES)
    ids, packed = split_packed_weights(ids)
    weights = packed if weights is None else weights
    for prompt, answer in REQUEST_TOKENS:
        if prompt in arrays and answer in arrays and "tokens" not in arrays:
            sequence = np.concatenate([arrays[prompt].ravel(), arrays[answer].ravel()])
            length = arrays[prompt].size
            request = Request(ids, sequence, weights=weights, scores=scores, prompt=length)
            return replace(
                routes_of_requests([request], "array", name), n_experts=_stated_experts(arrays)
            )
    tokens, documents, positions = (arrays.get(key) for key in TOKEN_KEYS)
    if documents is not None and positions is None and documents.shape == ids.shape[:1]:
        positions = positions_in_documents(documents)
    stated = _stated_experts(arrays)
    return Routes(
        ids, "array", name, tokens, documents, positions, weights, scores, n_experts=stated
    )


def positions_in_documents(documents: np.ndarray) -> np.ndarray:
    """Return the number of earlier rows of the same document, for each row."""
    order = np.argsort(documents, kind="stable")
    ordered = documents[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)])
    lengths = np.diff(np.r_[starts, len(ordered)])
    positions = np.empty(len(documents), np.int64)
    positions[order] = np.arange(len(documents)) - np.repeat(starts, lengths)
    return positions


def _stated_experts(arrays: Mapping[str, np.ndarray]) -> int | None:
    """Return the number of experts that a file states, else None."""
    value = arrays.get("n_experts")
    return (
        int(value) if value is not None and value.ndim == 0 and value.dtype.kind in "iu" else None
    )


def _first_named_array(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray | None:
    """Return the first of these arrays that exists, else None."""
    return next((arrays[name] for name in names if name in arrays), None)


def _numbered_samples(
    arrays: Mapping[str, np.ndarray],
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Return ids and tokens of each sample of arrays that are numbered by sample."""
    samples = []
    while f"{ROLLOUT}_{len(samples)}" in arrays:
        number = len(samples)
        samples.append((arrays[f"{ROLLOUT}_{number}"], arrays.get(f"tokens_{number}")))
    return samples


def _stacked_layers(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray | None:
    """Return ids (tokens, layers, k) of arrays that are numbered by layer; None without such."""
    per_layer: list[np.ndarray] = []
    while f"moe_topk_indices.{len(per_layer)}" in arrays:
        per_layer.append(arrays[f"moe_topk_indices.{len(per_layer)}"])
    shapes = {layer.shape for layer in per_layer}
    fits = len(shapes) <= 1 and all(layer.ndim == 2 for layer in per_layer)
    require(fits, f"{name}: layers must be (tokens, k) alike, got {sorted(shapes)[:4]}", TraceError)
    return np.stack(per_layer, 1) if per_layer else None


def _layers_by_number(arrays: Mapping[str, np.ndarray], name: str) -> "list[_TorchLayer]":
    """Return the layers of arrays (tokens, k) whose names have a number; empty without such."""
    flat = {key: a for key, a in arrays.items() if a.ndim == 2 and _last_number(key) < 1 << 30}
    ids = {_last_number(key): key for key, a in flat.items() if a.dtype.kind in "iu"}
    whole = any(key in arrays for key in ROUTE_ARRAYS) or any(a.ndim > 2 for a in arrays.values())
    if whole or not ids:
        return []
    of_layers = sum(a.dtype.kind in "iu" for a in flat.values())
    message = f"{name}: several arrays have the same number of a layer: {list(flat)[:6]!r:.200}"
    require(len(ids) == of_layers <= MOST_LAYERS, message, TraceError)
    weights = {_last_number(key): a for key, a in flat.items() if a.dtype.kind == "f"}
    return [
        _TorchLayer(
            f"{name}: {key:.80}",
            arrays[key],
            weights[number]
            if number in weights and weights[number].shape == arrays[key].shape
            else None,
        )
        for number, key in sorted(ids.items())
    ]


def _rollout_producer(arrays: Sequence[np.ndarray]) -> str:
    """Return "miles", which pads with -1, or "slime", which pads with zeros."""
    return "miles" if any(bool((array == -1).any()) for array in arrays) else "slime"


def _expert_array_name(arrays: Mapping[str, np.ndarray], name: str) -> str:
    """Return the name of the array with the expert ids; raises if it is ambiguous."""
    for candidate in ROUTE_ARRAYS:
        if candidate in arrays:
            return candidate
    other_names = {*WEIGHTS, *SCORES}
    candidates = [key for key, a in arrays.items() if a.ndim in (3, 4) and key not in other_names]
    shapes = {key[:40]: array.shape for key, array in list(arrays.items())[:5]}
    require(
        len(candidates) == 1,
        f"{name}: need one array of shape (tokens, layers, k), one called {ARRAY}, or integers "
        f"(tokens, k) of each layer with its number in their names; got {shapes}",
        TraceError,
    )
    return candidates[0]


def batch_routes(
    ids: np.ndarray, arrays: Mapping[str, np.ndarray], name: str, rollout: bool = False
) -> Routes:
    """Return the routes of a batch (sequences, length, layers, k); each sequence is a document.

    Rows are those with an `attention_mask` of 1. Without a mask, unwritten rows at both ends of a
    sequence are padding.

    Args:
        ids: the batch.
        arrays: `attention_mask` and `input_ids` (sequences, length), if known.
        name: name of the batch in errors.
        rollout: whether the batch is of slime or miles.
    """
    mask, tokens = arrays.get("attention_mask"), arrays.get("input_ids")
    for key, value in (("attention_mask", mask), ("input_ids", tokens)):
        fits = value is None or value.shape == ids.shape[:2]
        shape = None if value is None else value.shape
        require(fits, f"{name}: {key} must have shape {ids.shape[:2]}, got {shape}", TraceError)
    require(ids.dtype.kind in "iu", f"{name}: ids must be integers, got {ids.dtype}", TraceError)
    has_minus_one = bool((ids == -1).any())
    blank = (ids == -1).all((2, 3)) | (ids == 0).all((2, 3))
    shown = _filled_span_mask(~blank) if mask is None else mask.astype(bool)
    unwritten = _last_position_mask(shown) & blank
    zeros_inside = bool((shown & blank & ~unwritten).any())
    zeros_are_unwritten = (
        ids.shape[3] > 1 or has_minus_one or (len(ids) >= LEAST_SEQUENCES and not zeros_inside)
    )
    if zeros_are_unwritten and bool(
        unwritten.any(1).all()
    ):  # the last token of every sequence has no row
        shown = shown & ~unwritten
    require(bool(shown.any()), f"{name}: no token was routed in any layer", TraceError)
    ids, weights = split_packed_weights(ids)
    requests = [
        Request(
            ids[row, shown[row]],
            None if tokens is None else tokens[row, shown[row]],
            weights=None if weights is None else weights[row, shown[row]],
        )
        for row in range(len(ids))
        if shown[row].any()
    ]
    notes = [
        f"{int((~shown).sum())} of {shown.size} places of the batch are padding or last tokens"
    ]
    kinds = ("slime", "miles") if rollout else ("verl", "nemo")
    return routes_of_requests(requests, kinds[has_minus_one], name, notes)


def _filled_span_mask(used: np.ndarray) -> np.ndarray:
    """Return the mask of each row from its first used position to its last."""
    from_first = np.maximum.accumulate(used, axis=1)
    to_last = np.maximum.accumulate(used[:, ::-1], axis=1)[:, ::-1]
    return from_first & to_last


def _last_position_mask(shown: np.ndarray) -> np.ndarray:
    """Return the mask of the last shown position of each row."""
    after = shown[:, ::-1].cumsum(1)[:, ::-1]
    return shown & (after == 1)


TORCH_FILES = "*.pt"
PICKLES = (".pt", ".pth", ".pkl", ".pickle")
TORCH_IDS = (*COLUMNS["experts"], "ids", "top_k_ids", "top_indices")
TORCH_WEIGHTS = (*COLUMNS["weights"], "scores")


class _TorchLayer(NamedTuple):
    """One layer of a file.

    Attributes:
        name: its key or file.
        ids: chosen experts (tokens, k).
        weights: combine weights (tokens, k), or None.
    """

    name: str
    ids: np.ndarray
    weights: np.ndarray | None


def refuse_pickle(file: Path, head: bytes) -> None:
    """Raise if a file is a pickle, by its suffix and first bytes."""
    arrays = head[:6] == NPY_MAGIC or head[8:9] == b"{"
    pickled = file.suffix.lower() in PICKLES and not arrays
    pickled |= head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    pickled |= head[:2] == b"PK" and not pickled and is_torch_file(file)
    require(not pickled, _pickle_message(file), TraceError)


def _pickle_message(file: Path) -> str:
    """Return the error message for a pickle, with what to save instead."""
    return (
        f"{file}: is a pickle that holds more than plain tensors (as the expert recorder of SGLang "
        "writes it), and reading one runs code that is in the file. Where it was made, save the "
        "array instead: np.savez('routes.npz', routed_experts=array)"
    )


def is_torch_file(file: Path) -> bool:
    """Return whether a file is an archive of torch.save."""
    with (
        naming_unparsable_file(file),
        file.open("rb") as stream,
    ):  # is_zipfile raises for archives on two disks
        if stream.read(2) != b"PK" or not zipfile.is_zipfile(file):
            return False
    with naming_unparsable_file(file), zipfile.ZipFile(file) as archive:
        return any(name.endswith("data.pkl") for name in archive.namelist())


def torch_routes(path: str | Path) -> Routes:
    """Read the routes in a .pt file of tensors, or in a folder of one file per layer."""
    source = Path(path)
    if not source.is_dir():
        return _torch_content_routes(_load_torch_file(source), str(source))
    files = sorted(source.glob(TORCH_FILES), key=lambda file: (_last_number(file.stem), file.name))
    require(
        0 < len(files) <= MOST_LAYERS, f"{source}: {len(files)} files {TORCH_FILES}", TraceError
    )
    layers = [_torch_layer(_load_torch_file(file), str(file)) for file in files]
    return _stacked_torch_layers(layers, str(source), [file.stem for file in files])


def _last_number(name: str) -> int:
    """Return the last number in a name; 2^30 without one, to sort it last."""
    digits = re.findall(r"\d{1,9}", name)
    return int(digits[-1]) if digits else 1 << 30


def _load_torch_file(file: Path) -> Any:
    """Load the tensors of a .pt file without running code of it."""
    require(is_torch_file(file), _pickle_message(file), TraceError)
    with naming_unparsable_file(file), zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    size = sum(member.file_size for member in members)
    fits = not packed and size <= min(MOST_BYTES, file.stat().st_size)
    require(fits, f"{file}: states {size} bytes in {file.stat().st_size}", TraceError)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a hostile archive makes the reader raise
        raise TraceError(_pickle_message(file)) from error


def _tensor_array(tensor: Any, label: str) -> np.ndarray:
    """Return the numbers of a tensor; raises unless its storage holds all of them."""
    require(
        isinstance(tensor, torch.Tensor), f"{label}: needs a tensor, got {tensor!r:.40}", TraceError
    )
    dense = tensor.layout == torch.strided and not tensor.is_quantized
    size = tensor.numel() * tensor.element_size()
    is_complete = dense and size <= tensor.untyped_storage().nbytes()
    require(
        is_complete,
        f"{label}: a tensor of {tuple(tensor.shape)} that is not stored whole",
        TraceError,
    )
    numeric = tensor.detach()
    return (numeric.float() if numeric.is_floating_point() else numeric).numpy()


def _torch_content_routes(value: Any, name: str) -> Routes:
    """Return the routes of the content of a .pt file."""
    if isinstance(value, torch.Tensor):
        ids = _tensor_array(value, name)
        return replace(
            array_routes({ROUTE_ARRAYS[0]: ids[:, None] if ids.ndim == 2 else ids}, name),
            producer="torch",
        )
    if isinstance(value, Mapping) and any(key in value for key in ROUTE_ARRAYS):
        arrays = {
            str(key): _tensor_array(item, f"{name}: {key!s:.40}")
            for key, item in value.items()
            if isinstance(item, torch.Tensor)
        }
        return replace(array_routes(arrays, name), producer="torch")
    if isinstance(value, Mapping) and any(key in value for key in TORCH_IDS):
        layers = [_torch_layer(item, name) for item in _layers_of_fields(value)]
        return _stacked_torch_layers(layers, name, [str(number) for number in range(len(layers))])
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


def _layers_of_fields(value: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """Return the fields of each layer where their tensors are (tokens, layers, k), else all."""
    ids = next(value[key] for key in TORCH_IDS if key in value)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 3 or not 0 < ids.shape[1] <= MOST_LAYERS:
        return [value]
    tensors = {
        key: item
        for key, item in value.items()
        if isinstance(item, torch.Tensor) and item.shape == ids.shape
    }
    return [{key: x[:, n] for key, x in tensors.items()} for n in range(ids.shape[1])]


def _torch_layer(value: Any, label: str) -> _TorchLayer:
    """Return ids and weights of one layer, given as a tensor or as a mapping with both."""
    weights = None
    if isinstance(value, Mapping):
        key = next((name for name in TORCH_IDS if name in value), None)
        if key is None:
            raise TraceError(f"{label}: no field of experts among {list(value)[:6]!r:.120}")
        weights = next(
            (_tensor_array(value[x], f"{label}: {x}") for x in TORCH_WEIGHTS if x in value), None
        )
        value, label = value[key], f"{label}: {key}"
    ids = _tensor_array(value, label)
    fits = ids.ndim == 2 and ids.dtype.kind in "iu"
    require(
        fits, f"{label}: needs integers (tokens, k), got {ids.dtype} of {ids.shape}", TraceError
    )
    return _TorchLayer(
        label, ids, weights if weights is not None and weights.shape == ids.shape else None
    )


def _stacked_torch_layers(layers: list[_TorchLayer], name: str, keys: list[str]) -> Routes:
    """Return the routes of layers; raises unless their ids have one shape."""
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
