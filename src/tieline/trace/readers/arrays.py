"""Traces from the `routed_experts` arrays of vLLM and SGLang, in npy, npz and safetensors files.

The array has the shape (tokens, layers, k) and holds the experts chosen, with -1 where nothing was
routed: padding, or a layer without experts. There are no scores, so no gaps.

    all k ids -1                       the token was not routed in that layer
    unsigned array, k largest values   the same, written in a type without a sign
    one id k times in a whole layer    a dense layer left at the array's initial value (k > 1)

Layers in which no token was routed are left out, and so are tokens that were not routed in one of
the other layers; the provenance counts them.

Files are not trusted: no pickles, no object arrays, and a header must state the size that is there.
A compressed file may grow by what its compression can do (1032 times) and to 4 GiB in all.
"""

import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.trace.check import check_trace
from tieline.trace.folders import check_header_length, parsing
from tieline.trace.record import (
    MOST_EXPERTS,
    MOST_LAYERS,
    TOKEN_KEYS,
    LayerFacts,
    LayerTrace,
    RoutingTrace,
    unanswered,
)

MOST_BYTES = 4 << 30
_MOST_ARRAYS = 64
_DEFLATE_RATIO = 1032
_TENSOR_TYPES = {"I8", "I16", "I32", "I64", "U8", "U16", "U32", "F16", "F32", "F64"}


class _Header(NamedTuple):
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """Read all arrays of a file by name ("" for npy); the first bytes give the format."""
    file = Path(path)
    require(file.is_file(), f"{file}: no such file", TraceError)
    with parsing(file):
        with file.open("rb") as stream:
            magic = stream.read(6)
        if magic == b"\x93NUMPY":
            return {"": _read_npy(file)}
        return _read_npz(file) if magic[:2] == b"PK" else _read_safetensors(file)


def _read_npy(file: Path) -> np.ndarray:
    with file.open("rb") as stream:
        header = _npy_header(stream, file)
        start = stream.tell()
    _same_size(header.bytes, file.stat().st_size - start, file)
    if header.bytes == 0:
        return np.zeros(header.shape, header.dtype)
    order = "F" if header.fortran else "C"
    return np.memmap(file, header.dtype, "r", start, header.shape, order)


def _read_npz(file: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        require(len(members) <= _MOST_ARRAYS, f"{file}: {len(members)} arrays", TraceError)
        return {
            member.filename.removesuffix(".npy"): _read_member(archive, member, file)
            for member in members
        }


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: Path) -> np.ndarray:
    name = f"{file}: {member.filename!r:.80}"
    stored = member.compress_type == zipfile.ZIP_STORED
    known = stored or member.compress_type == zipfile.ZIP_DEFLATED
    require(known, f"{name}: compressed in a way that npz files are not", TraceError)
    most = member.compress_size * (1 if stored else _DEFLATE_RATIO) + 64
    fits = member.compress_size <= file.stat().st_size and member.file_size <= min(most, MOST_BYTES)
    require(fits, f"{name}: states a size of {member.file_size} bytes", TraceError)
    with archive.open(member) as stream:
        header = _npy_header(stream, name)
        _same_size(header.bytes, member.file_size - stream.tell(), name)
        data = stream.read()
    _same_size(header.bytes, len(data), name)
    flat = np.frombuffer(data, header.dtype)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def _npy_header(stream: IO[bytes], name: object) -> _Header:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    else:
        require(version == (2, 0), f"{name}: npy version {version} is not read", TraceError)
        read = np.lib.format.read_array_header_2_0
    header = _Header(*read(stream, max_header_size=10_000))
    plain = header.dtype.kind in "iuf" and header.dtype.itemsize <= 8
    require(plain, f"{name}: holds {header.dtype!s:.80}, not integers or real numbers", TraceError)
    require(all(size >= 0 for size in header.shape), f"{name}: shape {header.shape}", TraceError)
    return header


def _read_safetensors(file: Path) -> dict[str, np.ndarray]:
    check_header_length(file)
    with safe_open(file, framework="numpy") as tensors:
        names = list(tensors.keys())
        require(len(names) <= _MOST_ARRAYS, f"{file}: {len(names)} arrays", TraceError)
        for name in names:
            kind = tensors.get_slice(name).get_dtype()
            known = kind in _TENSOR_TYPES
            require(known, f"{file}: {name!r:.80} has type {kind}, not read", TraceError)
        return {name: tensors.get_tensor(name) for name in names}


def _same_size(stated: int, found: int, name: object) -> None:
    require(
        stated == found, f"{name}: the header states {stated} bytes, there are {found}", TraceError
    )


ARRAY = "routed_experts"


def import_routed_experts(
    path: str | Path, n_experts: int | None = None, layer_names: Sequence[str] | None = None
) -> RoutingTrace:
    """Read the trace in an npy, npz or safetensors file with an array (tokens, layers, k).

    In npz and safetensors files the array is called `routed_experts`, or is the only one of three
    axes; `tokens`, `documents` and `positions` of shape (tokens,) are optional.

    Args:
        path: the file.
        n_experts: number of experts E; by default one more than the largest id.
        layer_names: a name for each layer of the array; by default "layers.0", "layers.1", ...
    """
    arrays = read_arrays(path)
    name = _array_name(arrays, path)
    ids = {key: arrays[key] for key in TOKEN_KEYS if key in arrays}
    provenance = {"source": ARRAY, "file": Path(path).name}
    return routed_experts_trace(arrays[name], n_experts, layer_names, ids, provenance, str(path))


def routed_experts_trace(
    array: np.ndarray,
    n_experts: int | None = None,
    layer_names: Sequence[str] | None = None,
    token_ids: Mapping[str, np.ndarray] | None = None,
    provenance: Mapping[str, object] | None = None,
    name: str = ARRAY,
) -> RoutingTrace:
    """Return the trace of an array (tokens, layers, k), as `import_routed_experts`.

    Args:
        array: experts chosen.
        n_experts: number of experts E.
        layer_names: a name for each layer of the array.
        token_ids: `tokens`, `documents` and `positions` where known.
        provenance: where the array comes from.
        name: name of the array in errors.
    """
    _check_array(array, name)
    names = list(layer_names or (f"layers.{place}" for place in range(array.shape[1])))
    require(len(names) == array.shape[1], f"{name}: {len(names)} names of layers", TraceError)
    routed = _routed(array, n_experts)
    layers = np.flatnonzero(routed.any(0))
    kept = np.flatnonzero(routed[:, layers].all(1))
    require(len(layers) > 0, f"{name}: no token was routed in any layer", TraceError)
    require(len(kept) > 0, f"{name}: no token was routed in all layers with experts", TraceError)
    chosen = array[kept][:, layers]
    facts = LayerFacts(_number_of_experts(chosen, n_experts, name), array.shape[2], affine=False)
    own = {
        "n_experts": "inferred from the largest id" if n_experts is None else "given",
        "layers_left_out": [names[place] for place in np.flatnonzero(~routed.any(0))],
        "tokens_left_out": len(array) - len(kept),
    }
    records = _records(chosen, [names[place] for place in layers], facts)
    tokens, documents, positions = _token_ids(token_ids or {}, kept, len(array), name)
    own |= {"cannot_answer": unanswered(records)}
    origin = {**(provenance or {}), **own}
    trace = RoutingTrace(records, tokens, documents, positions, provenance=origin)
    check_trace(trace)
    return trace


def _array_name(arrays: Mapping[str, np.ndarray], path: str | Path) -> str:
    """The array of experts among those of a file."""
    candidates = [name for name, array in arrays.items() if array.ndim == 3]
    if ARRAY in arrays:
        return ARRAY
    found = {name[:40]: array.shape for name, array in list(arrays.items())[:5]}
    require(
        len(candidates) == 1,
        f"{path}: need one array of shape (tokens, layers, k), or one called {ARRAY}; got {found}",
        TraceError,
    )
    return candidates[0]


def _check_array(array: np.ndarray, name: str) -> None:
    fits = array.ndim == 3 and array.dtype.kind in "iu" and min(array.shape, default=0) > 0
    if not (fits and array.shape[1] <= MOST_LAYERS and array.shape[2] <= MOST_EXPERTS):
        raise TraceError(
            f"{name}: need integers of shape (tokens, layers, k), none of them zero, "
            f"got {array.dtype} of {array.shape}"
        )


def _routed(array: np.ndarray, n_experts: int | None) -> np.ndarray:
    """Whether each token was routed in each layer, (tokens, layers)."""
    k = array.shape[2]
    nothing = array == -1 if array.dtype.kind == "i" else array == np.iinfo(array.dtype).max
    signed = array.dtype.kind == "i"
    if not signed and k == 1 and (n_experts is None or n_experts > np.iinfo(array.dtype).max):
        nothing = np.zeros_like(nothing)  # the largest value is an expert like any other
    routed = ~nothing.all(2)
    if k > 1:
        repeated = (array == array[:, :, :1]).all(2)
        routed &= ~(repeated | ~routed).all(0)
    return routed


def _number_of_experts(chosen: np.ndarray, n_experts: int | None, name: str) -> int:
    low, high = int(chosen.min()), int(chosen.max())
    most = MOST_EXPERTS if n_experts is None else n_experts
    if low < 0 or high >= most:
        wrong = np.argwhere((chosen < 0) | (chosen >= most))[0]
        raise TraceError(
            f"{name}: experts must lie in 0 ... {most - 1}, or all k of a token be -1; got "
            f"{int(chosen[tuple(wrong)])} at (token, layer, rank) {tuple(wrong.tolist())} of those "
            "that were routed"
        )
    return max(high + 1, chosen.shape[2]) if n_experts is None else n_experts


def _records(chosen: np.ndarray, names: list[str], facts: LayerFacts) -> tuple[LayerTrace, ...]:
    small = np.int16 if facts.n_experts <= 1 << 15 else np.int32
    columns = (np.ascontiguousarray(chosen[:, place], dtype=small) for place in range(len(names)))
    return tuple(
        LayerTrace(name, facts, torch.from_numpy(column))
        for name, column in zip(names, columns, strict=True)
    )


def _token_ids(
    given: Mapping[str, np.ndarray], kept: np.ndarray, count: int, name: str
) -> list[Tensor]:
    """Tokens, documents and positions of what is kept: by default one document, in its order."""
    default = {
        "tokens": np.full(count, -1),
        "documents": np.zeros(count, dtype=np.int64),
        "positions": np.arange(count),
    }
    ids = []
    for key, value in {**default, **given}.items():
        fits = key in default and value.shape == (count,) and value.dtype.kind in "iu"
        require(fits, f"{name}: {key} must be {count} integers, got {value.shape}", TraceError)
        ids.append(torch.from_numpy(value[kept].astype(np.int64)))
    return ids
