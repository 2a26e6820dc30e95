"""Read moe_trace.csv (routes) and importance matrices (load of experts) of llama.cpp.

moe_trace.csv       one line "layer,expert" per choice: the k experts of a token, then the next
                    token of the batch in the same layer, then the next layer. Neither k nor
                    tokens are recorded, so k must be passed.
imatrix (GGUF)      `blk.N.ffn_gate_exps.weight.counts`: number of tokens of each expert. This is
                    the load only, without the choices of single tokens.
"""

import csv
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tieline.core.errors import TraceError, naming_unparsable_file, require
from tieline.core.files import require_file
from tieline.core.setting_fields import TraceSettingError
from tieline.core.untrusted_input import require_readable
from tieline.trace.readers.routes import Request, Routes, routes_of_requests
from tieline.trace.record import MOST_EXPERTS, MOST_LAYERS

MOE_TRACE_HEADER = ["layer", "expert"]
GGUF_MAGIC = b"GGUF"


def moe_trace_routes(path: str | Path, k: int | None) -> Routes:
    """Read the routes in a moe_trace.csv with k experts per token; each batch is a document."""
    file = Path(path)
    if k is None:
        raise TraceSettingError(
            "{file}: a moe-trace does not say how many experts a token has: give {k}", file=file
        )
    batches = list(_moe_trace_batches(file, k))
    layers = sorted({layer for batch in batches for layer in batch})
    requests = []
    for number, batch in enumerate(batches):
        sizes = {len(batch.get(layer, ())) for layer in layers}
        require(
            len(sizes) == 1,
            f"{file}: batch {number} has {sorted(sizes)} tokens in its layers; llama.cpp computes "
            "the last layer for the last token alone unless logits of all tokens are asked for",
            TraceError,
        )
        requests.append(Request(np.stack([batch[layer] for layer in layers], 1)))
    notes = [f"{len(requests)} batches, each a document; tokens are not recorded"]
    routes = routes_of_requests(requests, "moe-trace", str(file), notes)
    return replace(routes, tokens=None, layer_names=tuple(f"layers.{layer}" for layer in layers))


def _moe_trace_batches(file: Path, k: int) -> Iterator[dict[int, np.ndarray]]:
    """Yield the ids (tokens, k) by layer of each batch; a layer that recurs begins a new batch."""
    batch: dict[int, np.ndarray] = {}
    for layer, ids in _moe_trace_layers(file):
        require(
            len(ids) % k == 0,
            f"{file}: layer {layer} has {len(ids)} choices in a row, which {k=} does not divide",
            TraceError,
        )
        if layer in batch:
            yield batch
            batch = {}
        batch[layer] = np.array(ids, np.int64).reshape(-1, k)
    if batch:
        yield batch


def _moe_trace_layers(file: Path) -> Iterator[tuple[int, list[int]]]:
    """Yield a layer and its experts for each run of consecutive lines of one layer."""
    current, ids = None, []
    for layer, expert in _moe_trace_lines(file):
        if layer != current and ids:
            yield int(current or 0), ids
            ids = []
        current = layer
        ids.append(expert)
    require(bool(ids), f"{file}: has no rows", TraceError)
    yield int(current or 0), ids


def _moe_trace_lines(file: Path) -> Iterator[tuple[int, int]]:
    """Yield layer and expert of each line of a moe_trace.csv."""
    require_readable(file)
    with naming_unparsable_file(file), file.open(encoding="utf-8-sig", newline="") as stream:
        for number, cells in enumerate(csv.reader(stream, strict=True), 1):
            if number == 1 and cells == MOE_TRACE_HEADER:
                continue
            fits = len(cells) == 2 and all(re.fullmatch("[0-9]{1,7}", cell) for cell in cells)
            require(
                fits, f"{file}: line {number}: needs layer,expert, got {cells!r:.60}", TraceError
            )
            layer, expert = map(int, cells)
            inside = layer < MOST_LAYERS and expert < MOST_EXPERTS
            require(inside, f"{file}: line {number}: {layer},{expert} is too large", TraceError)
            yield layer, expert


@dataclass(frozen=True, eq=False)
class ImatrixLoad:
    """Number of tokens per expert in each layer.

    Attributes:
        layers: counts (E,) by name of the layer.
        source: file of the counts.
    """

    layers: Mapping[str, np.ndarray]
    source: str

    @property
    def dead(self) -> dict[str, list[int]]:
        """Experts without tokens, by layer."""
        return {name: np.flatnonzero(x == 0).tolist() for name, x in self.layers.items()}


_COUNTS = re.compile(
    r"blk\.(\d{1,4})\.ffn_(gate_exps|up_exps|gate_up_exps|down_exps)\.weight\.counts"
)
_BYTES_BY_TYPE = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _LIST, _F32 = 8, 9, 0
_MOST_GGUF_ENTRIES = 1 << 20


def imatrix_load(path: str | Path) -> ImatrixLoad:
    """Read the counts of experts in an importance matrix of llama.cpp (GGUF)."""
    file = Path(path)
    require_file(file, TraceError)
    with naming_unparsable_file(file), file.open("rb") as stream:
        counts = dict(_imatrix_counts(stream, file))
    require(
        bool(counts),
        f"{file}: has no tensor blk.N.ffn_*_exps.weight.counts: no importance matrix of a "
        "Mixture of Experts",
        TraceError,
    )
    return ImatrixLoad({f"layers.{n}": counts[n] for n in sorted(counts)}, str(file))


def _imatrix_counts(stream: Any, file: Path) -> Iterator[tuple[int, np.ndarray]]:
    """Yield layer number and counts of each layer in an importance matrix."""
    size = file.stat().st_size
    require(stream.read(4) == GGUF_MAGIC, f"{file}: is no GGUF file", TraceError)
    version, tensors, values = struct.unpack("<IQQ", stream.read(20))
    require(version in (2, 3), f"{file}: GGUF version {version} is not read", TraceError)
    few = tensors <= _MOST_GGUF_ENTRIES and values <= _MOST_GGUF_ENTRIES
    require(few, f"{file}: states {tensors} tensors and {values} values", TraceError)
    alignment = 32
    for _ in range(values):
        key, value = _read_imatrix_text(stream, size), _skip_imatrix_value(stream, size)
        alignment = value if key == "general.alignment" and value else alignment
    infos = [_imatrix_tensor_info(stream, size) for _ in range(tensors)]
    start = -(-stream.tell() // alignment) * alignment
    layers = set()
    for name, count, kind, offset in infos:
        match = _COUNTS.fullmatch(name)
        if match and int(match[1]) not in layers and count > 1:
            layers.add(int(match[1]))
            inside = kind == _F32 and count <= MOST_EXPERTS and start + offset + 4 * count <= size
            require(inside, f"{file}: {name} is not float32 inside of the file", TraceError)
            stream.seek(start + offset)
            counts = np.frombuffer(stream.read(4 * count), "<f4")
            valid = bool(np.isfinite(counts).all() and (counts >= 0).all())
            require(valid, f"{file}: {name} holds no counts", TraceError)
            yield int(match[1]), counts.astype(np.int64)


def _read_imatrix_text(stream: Any, size: int) -> str:
    """Read a GGUF string of bounded length."""
    (length,) = struct.unpack("<Q", stream.read(8))
    require(length <= min(size, 1 << 20), f"a text of {length} bytes", TraceError)
    return stream.read(length).decode("utf-8", "replace")


def _skip_imatrix_value(stream: Any, size: int) -> int | None:
    """Skip a GGUF value; returns it if it is an unsigned 32-bit integer, else None."""
    (kind,) = struct.unpack("<I", stream.read(4))
    if kind == _STRING:
        _read_imatrix_text(stream, size)
        return None
    if kind == _LIST:
        inner, count = struct.unpack("<IQ", stream.read(12))
        require(count <= size, f"a list of {count} values", TraceError)
        if inner == _STRING:
            for _ in range(count):
                _read_imatrix_text(stream, size)
            return None
        require(inner in _BYTES_BY_TYPE, f"a list of type {inner}", TraceError)
        stream.seek(count * _BYTES_BY_TYPE[inner], 1)
        return None
    require(kind in _BYTES_BY_TYPE, f"a value of type {kind}", TraceError)
    data = stream.read(_BYTES_BY_TYPE[kind])
    return int.from_bytes(data, "little") if kind == 4 else None


def _imatrix_tensor_info(stream: Any, size: int) -> tuple[str, int, int, int]:
    """Read name, number of elements, type and offset of a tensor."""
    name = _read_imatrix_text(stream, size)
    (axes,) = struct.unpack("<I", stream.read(4))
    require(axes <= 4, f"{name:.80}: {axes} axes", TraceError)
    sizes = struct.unpack(f"<{axes}Q", stream.read(8 * axes))
    kind, offset = struct.unpack("<IQ", stream.read(12))
    count = 1
    for number in sizes:
        count = min(count * number, 1 << 62)
    return name, count, kind, offset
