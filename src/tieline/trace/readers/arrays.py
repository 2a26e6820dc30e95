"""Routes in array files: npy, npz and safetensors.

    routed_experts            (tokens, layers, k), of vLLM, SGLang, TensorRT-LLM or anybody
    routed_experts            (sequences, length, layers, k), of verl (zeros where nothing was
                              written) and NeMo-RL (-1 where the live router is to choose)
    rollout_routed_experts    the same of slime and miles; also `rollout_routed_experts_0`, ..., an
                              array per sample
    routed_experts            (tokens, layers, 2k) of prime-rl: ids, bits of float32 weights
    routing_replay_out        (tokens, k) of FlashInfer: one layer
    moe_topk_indices.0, ...   (tokens, k) of each routed layer, as Megatron replays them

The ids may be called anything if they are the only array of three axes. Beside them a file may have

    tokens, documents, positions   (tokens,)
    prompt_token_ids, token_ids    prompt and answer of one request (also `prompt` and `out`)
    input_ids, attention_mask      (sequences, length) of a batch
    weights                        combine weights, shape of the ids (also `topk_weights`)
    scores                         selection scores, (tokens, layers, k) of the chosen experts or
                                   (tokens, layers, E) of all (also `router_logits`)
    n_experts                      a number
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tieline.core.errors import TraceError, require
from tieline.trace.readers.decoding import read_arrays
from tieline.trace.readers.routes import Request, Routes, assemble, unpacked_weights
from tieline.trace.record import TOKEN_KEYS

ARRAY = "routed_experts"
ROLLOUT = "rollout_routed_experts"
NAMES = (ARRAY, ROLLOUT, "routing_replay_out")
RULE = "needs the axes (tokens, layers, k) or (sequences, length, layers, k)"
WEIGHTS = ("weights", "topk_weights", "routing_weights")
SCORES = ("scores", "router_logits", "logits")
PROMPTS = (("prompt_token_ids", "token_ids"), ("prompt", "out"), ("prompt", "output"))
"""Names of the tokens of a request: its prompt and its answer."""

LEAST_SEQUENCES = 4
"""Sequences whose last rows alone are zero, from which zero means nothing where k = 1."""


def read_array_file(path: str | Path) -> Routes:
    """Read the routes in an npy, npz or safetensors file."""

    def check(name: str, shape: tuple[int, ...]) -> None:
        fits = name not in NAMES or 2 <= len(shape) <= 4
        require(fits, f"{path}: {name}: {RULE}, got {shape}", TraceError)

    return array_routes(read_arrays(path, check), str(path))


def array_routes(arrays: Mapping[str, np.ndarray], name: str) -> Routes:
    """Return the routes among named arrays."""
    samples = _numbered_samples(arrays)
    if samples:
        requests = [Request(ids, tokens) for ids, tokens in samples]
        return assemble(requests, _rollout_producer([ids for ids, _ in samples]), name)
    layers = _stacked_layers(arrays, name)
    if layers is not None:
        return replace(_flat_routes(layers, arrays, name), producer="megatron")
    key = _array_name(arrays, name)
    ids = arrays[key]
    if key == "routing_replay_out" and ids.ndim == 2:
        ids = ids[:, None]
    if ids.ndim == 4:
        return batch_routes(ids, arrays, name, rollout=key == ROLLOUT)
    flat = _flat_routes(ids, arrays, name)
    return replace(flat, producer=_rollout_producer([ids])) if key == ROLLOUT else flat


def _flat_routes(ids: np.ndarray, arrays: Mapping[str, np.ndarray], name: str) -> Routes:
    """Routes of an array (tokens, layers, k)."""
    weights, scores = _first_named_array(arrays, WEIGHTS), _first_named_array(arrays, SCORES)
    ids, packed = unpacked_weights(ids)
    weights = packed if weights is None else weights
    for prompt, answer in PROMPTS:
        if prompt in arrays and answer in arrays and "tokens" not in arrays:
            sequence = np.concatenate([arrays[prompt].ravel(), arrays[answer].ravel()])
            request = Request(ids, sequence, weights=weights, scores=scores)
            return replace(assemble([request], "array", name), n_experts=_stated_experts(arrays))
    tokens, documents, positions = (arrays.get(key) for key in TOKEN_KEYS)
    stated = _stated_experts(arrays)
    return Routes(
        ids, "array", name, tokens, documents, positions, weights, scores, n_experts=stated
    )


def _stated_experts(arrays: Mapping[str, np.ndarray]) -> int | None:
    """The number of experts that a file states."""
    value = arrays.get("n_experts")
    return (
        int(value) if value is not None and value.ndim == 0 and value.dtype.kind in "iu" else None
    )


def _first_named_array(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray | None:
    """The first of these arrays that is there."""
    return next((arrays[name] for name in names if name in arrays), None)


def _numbered_samples(
    arrays: Mapping[str, np.ndarray],
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Ids and tokens of arrays that are numbered by sample."""
    samples = []
    while f"{ROLLOUT}_{len(samples)}" in arrays:
        number = len(samples)
        samples.append((arrays[f"{ROLLOUT}_{number}"], arrays.get(f"tokens_{number}")))
    return samples


def _stacked_layers(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray | None:
    """Ids (tokens, layers, k) from arrays that are numbered by layer."""
    per_layer: list[np.ndarray] = []
    while f"moe_topk_indices.{len(per_layer)}" in arrays:
        per_layer.append(arrays[f"moe_topk_indices.{len(per_layer)}"])
    shapes = {layer.shape for layer in per_layer}
    fits = len(shapes) <= 1 and all(layer.ndim == 2 for layer in per_layer)
    require(fits, f"{name}: layers must be (tokens, k) alike, got {sorted(shapes)[:4]}", TraceError)
    return np.stack(per_layer, 1) if per_layer else None


def _rollout_producer(arrays: Sequence[np.ndarray]) -> str:
    """The program that pads with -1, or the one that pads with zeros."""
    return "miles" if any(bool((array == -1).any()) for array in arrays) else "slime"


def _array_name(arrays: Mapping[str, np.ndarray], name: str) -> str:
    """Name of the array that holds the experts."""
    for candidate in NAMES:
        if candidate in arrays:
            return candidate
    others = {*WEIGHTS, *SCORES}
    candidates = [key for key, a in arrays.items() if a.ndim in (3, 4) and key not in others]
    shapes = {key[:40]: array.shape for key, array in list(arrays.items())[:5]}
    require(
        len(candidates) == 1,
        f"{name}: need one array of shape (tokens, layers, k), or one called {ARRAY}; got {shapes}",
        TraceError,
    )
    return candidates[0]


def batch_routes(
    ids: np.ndarray, arrays: Mapping[str, np.ndarray], name: str, rollout: bool = False
) -> Routes:
    """Return the routes of a batch (sequences, length, layers, k); each sequence is a document.

    Rows are those that `attention_mask` shows. Without a mask, rows at both ends of a sequence to
    which nothing was written are padding.

    Args:
        ids: the batch.
        arrays: `attention_mask` and `input_ids` (sequences, length), where known.
        name: what to call the batch in errors.
        rollout: whether it is one of slime or miles.
    """
    mask, tokens = arrays.get("attention_mask"), arrays.get("input_ids")
    for key, value in (("attention_mask", mask), ("input_ids", tokens)):
        fits = value is None or value.shape == ids.shape[:2]
        shape = None if value is None else value.shape
        require(fits, f"{name}: {key} must have shape {ids.shape[:2]}, got {shape}", TraceError)
    require(ids.dtype.kind in "iu", f"{name}: ids must be integers, got {ids.dtype}", TraceError)
    live = bool((ids == -1).any())
    blank = (ids == -1).all((2, 3)) | (ids == 0).all((2, 3))
    shown = _between_ends(~blank) if mask is None else mask.astype(bool)
    unwritten = _last_shown(shown) & blank
    others = bool((shown & blank & ~unwritten).any())
    certain = ids.shape[3] > 1 or live or (len(ids) >= LEAST_SEQUENCES and not others)
    if certain and bool(unwritten.any(1).all()):  # the last token of every sequence has no row
        shown = shown & ~unwritten
    require(bool(shown.any()), f"{name}: no token was routed in any layer", TraceError)
    ids, weights = unpacked_weights(ids)
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
    return assemble(requests, kinds[live], name, notes)


def _between_ends(used: np.ndarray) -> np.ndarray:
    """Mask of each row from its first used position to its last."""
    after = np.maximum.accumulate(used, axis=1)
    before = np.maximum.accumulate(used[:, ::-1], axis=1)[:, ::-1]
    return after & before


def _last_shown(shown: np.ndarray) -> np.ndarray:
    """Mask of the last shown position of each row."""
    after = shown[:, ::-1].cumsum(1)[:, ::-1]
    return shown & (after == 1)
