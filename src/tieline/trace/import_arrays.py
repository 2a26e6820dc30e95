"""Traces from the `routed_experts` arrays that vLLM and SGLang return.

The array has the shape (tokens, layers, k) and holds the experts chosen, with -1 where nothing was
routed: padding, or a layer without experts. There are no scores, so the trace knows who was chosen
and not by how much.

    all k ids -1                       the token was not routed in that layer
    unsigned array, k largest values   the same, written in a type without a sign
    one id k times in a whole layer    a dense layer left at the array's initial value (k > 1)

Layers in which no token was routed are left out. So are tokens that were not routed in one of the
other layers; the provenance counts them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.array_files import read_arrays
from tieline.trace.checks import check_trace
from tieline.trace.layerfile import MOST_LAYERS
from tieline.trace.layout import MOST_EXPERTS
from tieline.trace.limits import unanswered
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace

__all__ = ["import_routed_experts", "routed_experts_trace"]

ARRAY = "routed_experts"
_KEYS = ("tokens", "documents", "positions")


def import_routed_experts(
    path: str | Path, n_experts: int | None = None, layer_names: Sequence[str] | None = None
) -> RoutingTrace:
    """The trace in an npy, npz or safetensors file with an array (tokens, layers, k).

    In npz and safetensors files the array is called `routed_experts`, or is the only one of three
    axes; `tokens`, `documents` and `positions` of shape (tokens,) are read where they are.

    Args:
        path: the file.
        n_experts: number of experts E; by default one more than the largest id, which misses
            experts at the end that were never chosen.
        layer_names: a name for each layer of the array; by default "layers.0", "layers.1", ...
    """
    arrays = read_arrays(path)
    name = _array_name(arrays, path)
    ids = {key: arrays[key] for key in _KEYS if key in arrays}
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
    """The trace of an array (tokens, layers, k) in memory; `import_routed_experts` says more.

    Args:
        array: experts chosen.
        n_experts: number of experts E.
        layer_names: a name for each layer of the array.
        token_ids: `tokens`, `documents` and `positions` where known.
        provenance: where the array comes from.
        name: what to call the array in an error.
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
    require(
        fits and array.shape[1] <= MOST_LAYERS and array.shape[2] <= MOST_EXPERTS,
        f"{name}: need integers of shape (tokens, layers, k), none of them zero, "
        f"got {array.dtype} of {array.shape}",
        TraceError,
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
