"""Write a trace in the form that another program reads or replays.

    vllm       JSON lines, an answer per document: choices[0].routed_experts, base64 of an .npy
    sglang     JSON lines, an answer per document: meta_info.routed_experts, base64 of raw int32
    verl       npz or safetensors: routed_experts (sequences, length, layers, k), zeros for nothing
    nemo       the same with -1 where the live router is to choose
    megatron   npz or safetensors: moe_topk_indices.0, ... int64 (tokens, k), one per routed layer,
               as `RouterReplay.set_replay_data` takes them
    npz        routed_experts (tokens, layers, k) with tokens, documents, positions and weights
    trace      a folder of our own, scores and all

Each is read back by its reader. Files are written whole or not at all.
"""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import save

from tieline.core.errors import ParameterError, TraceError, require
from tieline.core.files import write_whole
from tieline.trace.record import TOKEN_KEYS, RoutingTrace
from tieline.trace.store import save_trace
from tieline.trace.writers.batches import document_rows, layer_numbers, padded, stacked

Form = Literal["vllm", "sglang", "verl", "megatron", "nemo", "npz", "trace"]
FORMS: tuple[Form, ...] = ("vllm", "sglang", "verl", "megatron", "nemo", "npz", "trace")


def export(
    trace: RoutingTrace,
    path: str | Path,
    to: str | None = None,
    *,
    layers: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a trace in one of the forms of other programs.

    Args:
        trace: the trace.
        path: the file, or the folder of the form "trace".
        to: the form; by default "npz" for a file that ends in .npz, and "trace" otherwise.
        layers: number of layers of the model, for forms that count dense layers.
        overwrite: whether a folder of the form "trace" may be replaced.
    """
    target = Path(path)
    form = to or ("npz" if target.suffix == ".npz" else "trace")
    if form not in FORMS:
        raise ParameterError(f"no form is called {form!r:.40}; there are {', '.join(FORMS)}")
    if form == "trace":
        save_trace(trace, target, overwrite)
    else:
        write_whole(target, _content(trace, target, form, layers))
    return target


def replay_list(trace: RoutingTrace) -> list[torch.Tensor]:
    """Return int64 tensors (tokens, k) per routed layer, for `RouterReplay.set_replay_data`."""
    return [layer.experts[:, : layer.facts.k].long() for layer in trace.layers]


def _content(trace: RoutingTrace, target: Path, form: str, layers: int | None) -> bytes:
    if form in ("vllm", "sglang"):
        answer = _vllm if form == "vllm" else _sglang
        return b"".join(json.dumps(value).encode() + b"\n" for value in answer(trace, layers))
    return _array_file(_arrays(trace, form, layers), target)


def _arrays(trace: RoutingTrace, form: str, layers: int | None) -> dict[str, np.ndarray]:
    if form in ("verl", "nemo"):
        return padded(trace, 0 if form == "verl" else -1, layers)
    keys = {key: getattr(trace, key).numpy().astype(np.int64) for key in TOKEN_KEYS}
    experts = np.array(max(layer.facts.n_experts for layer in trace.layers))
    if form == "megatron":
        per_layer = {f"moe_topk_indices.{i}": x.numpy() for i, x in enumerate(replay_list(trace))}
        return per_layer | keys | {"n_experts": experts}
    ids = stacked(trace, range(len(trace.layers)), len(trace.layers), 0)
    weights = [layer.weights for layer in trace.layers]
    kept = [x.float().numpy() for x in weights if x is not None]
    more = {"weights": np.stack(kept, 1)} if len(kept) == len(weights) else {}
    return {"routed_experts": ids, **keys, "n_experts": experts, **more}


def _array_file(arrays: dict[str, np.ndarray], target: Path) -> bytes:
    if target.suffix == ".safetensors":
        return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    if target.suffix == ".npz":
        stream = io.BytesIO()
        np.savez_compressed(stream, allow_pickle=False, **arrays)
        return stream.getvalue()
    raise TraceError(f"{target}: must end in .npz or .safetensors")


def _documents(
    trace: RoutingTrace, layers: int | None
) -> Iterator[tuple[np.ndarray, list[int], int]]:
    """Rows, token ids and first position of each document, which must have no holes."""
    numbers = layer_numbers(trace, layers)
    ids = stacked(trace, numbers, layers or numbers[-1] + 1, 0)
    tokens, positions = trace.tokens.numpy(), trace.positions.numpy()
    for document in document_rows(trace):
        first, last = int(positions[document[0]]), int(positions[document[-1]])
        require(
            last - first + 1 == len(document),
            f"a document has {len(document)} rows for positions {first} ... {last}: only the forms "
            "verl, nemo, megatron, npz and trace can leave tokens out",
            TraceError,
        )
        yield ids[document], tokens[document].tolist(), first


def _vllm(trace: RoutingTrace, layers: int | None) -> Iterator[dict[str, Any]]:
    for number, (rows, tokens, start) in enumerate(_documents(trace, layers)):
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(rows))
        routes = base64.b64encode(stream.getvalue()).decode()
        choice = {"index": 0, "token_ids": [], "routed_experts": routes}
        prompt = {"prompt_token_ids": tokens} if start == 0 and min(tokens) >= 0 else {}
        head = {"id": f"document-{number}", "routed_experts_prompt_start": start}
        yield head | prompt | {"choices": [choice]}


def _sglang(trace: RoutingTrace, layers: int | None) -> Iterator[dict[str, Any]]:
    for rows, tokens, start in _documents(trace, layers):
        data = np.ascontiguousarray(rows, "<i4").tobytes()
        meta = {
            "routed_experts": base64.b64encode(data).decode(),
            "routed_experts_shape": list(rows.shape),
            "routed_experts_start_len": start,
        }
        has_prompt = start == 0 and min(tokens) >= 0
        yield {"meta_info": meta} | (
            {"prompt_token_ids": tokens, "output_ids": []} if has_prompt else {}
        )
