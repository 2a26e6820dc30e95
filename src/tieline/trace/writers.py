"""Write a trace in a file format that another program reads or replays.

    vllm       JSON lines, an answer per document: choices[0].routed_experts, base64 of an .npy
    sglang     JSON lines, an answer per document: meta_info.routed_experts, base64 of raw int32
    verl       npz or safetensors: routed_experts (sequences, length, layers, k), zeros for nothing
    nemo       the same with -1 where the live router shall choose
    megatron   npz or safetensors: moe_topk_indices.0, ... int64 (tokens, k), one per routed layer,
               as `RouterReplay.set_replay_data` takes them
    npz        routed_experts (tokens, layers, k) with tokens, documents, positions and weights
    trace      a folder of our own, with scores

Each form is read back by its reader. Files are written completely or not at all.

A program that keeps an array for *all* layers of a model writes a dense layer as zeros (vLLM,
SGLang, verl) or as -1 (NeMo-RL). The index of a layer is the number in its name; if some name has
no number or several, layers get the indices 0, 1, ... in order.
"""

import base64
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import save

from tieline.core.errors import ParameterError, TraceError, require
from tieline.core.files import write_whole
from tieline.core.setting_fields import require_setting
from tieline.core.text import layer_label
from tieline.trace.document_runs import document_rows
from tieline.trace.record import MOST_LAYERS, TOKEN_KEYS, RoutingTrace
from tieline.trace.store import save_trace

Form = Literal["vllm", "sglang", "verl", "megatron", "nemo", "npz", "trace"]
FORMS: tuple[Form, ...] = ("vllm", "sglang", "verl", "megatron", "nemo", "npz", "trace")
MOST_IDS = 1 << 32
"""Largest number of ids of a padded batch."""


def export(
    trace: RoutingTrace,
    path: str | Path,
    to: str | None = None,
    *,
    layers: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a trace in the file format of another program.

    Args:
        trace: the trace.
        path: the file, or the folder of the form "trace".
        to: the form; by default "npz" for a file that ends in .npz, and "trace" otherwise.
        layers: number of layers of the model, for forms that include dense layers.
        overwrite: whether a file, or a folder of the form "trace", may be replaced.
    """
    target = Path(path)
    form = to or ("npz" if target.suffix == ".npz" else "trace")
    if form not in FORMS:
        raise ParameterError(f"no form is called {form!r:.40}; there are {', '.join(FORMS)}")
    if form == "trace":
        save_trace(trace, target, overwrite)
    else:
        require_setting(
            overwrite or not target.is_file(),
            "{path} exists: choose another name or add {overwrite}",
            path=target,
        )
        write_whole(target, _encoded_form(trace, target, form, layers), replace=overwrite)
    return target


def replay_list(trace: RoutingTrace) -> list[torch.Tensor]:
    """Return int64 tensors (tokens, k) per routed layer, for `RouterReplay.set_replay_data`."""
    return [layer.experts[:, : layer.facts.k].long() for layer in trace.layers]


def _encoded_form(trace: RoutingTrace, target: Path, form: str, layers: int | None) -> bytes:
    """Return the bytes of a file in any form but "trace"."""
    if form in ("vllm", "sglang"):
        answer = _vllm_answers if form == "vllm" else _sglang_answers
        return b"".join(json.dumps(value).encode() + b"\n" for value in answer(trace, layers))
    arrays = _form_arrays(trace, form, layers)
    if target.suffix == ".safetensors":
        return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    if target.suffix == ".npz":
        stream = io.BytesIO()
        np.savez_compressed(stream, allow_pickle=False, **arrays)
        return stream.getvalue()
    raise TraceError(f"{target}: must end in .npz or .safetensors")


def _form_arrays(trace: RoutingTrace, form: str, layers: int | None) -> dict[str, np.ndarray]:
    """Return the named arrays of a form that is written as .npz or .safetensors."""
    if form in ("verl", "nemo"):
        return padded_batch(trace, 0 if form == "verl" else -1, layers)
    keys = {key: getattr(trace, key).numpy().astype(np.int64) for key in TOKEN_KEYS}
    experts = np.array(max(layer.facts.n_experts for layer in trace.layers))
    if form == "megatron":
        per_layer = {f"moe_topk_indices.{i}": x.numpy() for i, x in enumerate(replay_list(trace))}
        return per_layer | keys | {"n_experts": experts}
    ids = stacked_routes(trace, range(len(trace.layers)), len(trace.layers), 0)
    weights = stacked_weights(trace)
    more = {} if weights is None else {"weights": weights}
    return {"routed_experts": ids, **keys, "n_experts": experts, **more}


def _document_routes(
    trace: RoutingTrace, layers: int | None
) -> Iterator[tuple[np.ndarray, list[int], int]]:
    """Yield rows, token ids and first position of each document; raises for missing positions."""
    numbers = model_layer_indices([layer.name for layer in trace.layers], layers)
    ids = stacked_routes(trace, numbers, layers or numbers[-1] + 1, 0)
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


def _vllm_answers(trace: RoutingTrace, layers: int | None) -> Iterator[dict[str, Any]]:
    """Yield answers in the form of vLLM's server, one per document."""
    for number, (rows, tokens, start) in enumerate(_document_routes(trace, layers)):
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(rows))
        routes = base64.b64encode(stream.getvalue()).decode()
        choice = {"index": 0, "token_ids": [], "routed_experts": routes}
        prompt = {"prompt_token_ids": tokens} if start == 0 and min(tokens) >= 0 else {}
        head = {"id": f"document-{number}", "routed_experts_prompt_start": start}
        yield head | prompt | {"choices": [choice]}


def _sglang_answers(trace: RoutingTrace, layers: int | None) -> Iterator[dict[str, Any]]:
    """Yield answers in the form of SGLang's server, one per document."""
    for rows, tokens, start in _document_routes(trace, layers):
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


def model_layer_indices(names: Sequence[str], layers: int | None = None) -> list[int]:
    """Return the index of each layer among all layers of the model.

    Args:
        names: names of the routed layers.
        layers: number of layers of the model, which the indices must not exceed.
    """
    digits = [re.findall(r"(?:^|\.)(\d{1,4})(?=\.|$)", name) for name in names]
    single = [int(matches[0]) for matches in digits if len(matches) == 1]
    numbers = list(range(len(digits)))
    if len(single) == len(digits) and single == sorted(set(single)):
        numbers = single
    most = MOST_LAYERS if layers is None else layers
    require(
        numbers[-1] < most,
        f"{layer_label(names[-1])} has no place among {most} layers",
        TraceError,
    )
    return numbers


def stacked_routes(
    trace: RoutingTrace, numbers: Sequence[int], count: int, fill: int
) -> np.ndarray:
    """Return the chosen experts (tokens, count, k), with `fill` in layers that are not routed."""
    sizes = {layer.facts.k for layer in trace.layers}
    require(
        len(sizes) == 1, f"layers choose {sorted(sizes)} experts: an array has one k", TraceError
    )
    k = sizes.pop()
    largest = max(layer.facts.n_experts for layer in trace.layers)
    array = np.full((trace.n_tokens, count, k), fill, _id_dtype(largest, fill))
    for number, layer in zip(numbers, trace.layers, strict=True):
        array[:, number] = layer.experts[:, :k].numpy()
    return array


def stacked_weights(trace: RoutingTrace) -> np.ndarray | None:
    """Return the combine weights (tokens, layers, k); None if a layer has none."""
    weights = [layer.weights for layer in trace.layers]
    recorded = [x.float().numpy() for x in weights if x is not None]
    return np.stack(recorded, 1) if len(recorded) == len(weights) else None


def _id_dtype(experts: int, fill: int) -> type:
    """Return the integer type that vLLM uses for these ids, a signed one if `fill` < 0."""
    if fill < 0:
        return np.int16 if experts <= 1 << 15 else np.int32
    return np.uint8 if experts <= 1 << 8 else np.uint16


def padded_batch(
    trace: RoutingTrace, fill: int = 0, layers: int | None = None
) -> dict[str, np.ndarray]:
    """Return `routed_experts` (sequences, length, layers, k), `attention_mask` and `input_ids`.

    Each document is a sequence, padded on the right. Positions without a record hold `fill`; the
    mask is 1 at them if a later position has a record.

    Args:
        trace: the trace.
        fill: value at positions and layers without routes: 0 in verl, -1 in NeMo-RL.
        layers: number of layers of the model; by default up to the last routed one.
    """
    numbers = model_layer_indices([layer.name for layer in trace.layers], layers)
    ids = stacked_routes(trace, numbers, layers or numbers[-1] + 1, fill)
    documents, positions = document_rows(trace), trace.positions.numpy()
    length = max(int(positions[document[-1]]) + 1 for document in documents)
    size = len(documents) * length * ids[0].size
    require(size <= MOST_IDS, f"a padded batch of {size} ids is too large", TraceError)
    has_tokens = bool((trace.tokens >= 0).all())
    batch = np.full((len(documents), length, *ids.shape[1:]), fill, ids.dtype)
    mask, tokens = np.zeros(batch.shape[:2], np.int64), np.zeros(batch.shape[:2], np.int64)
    for row, document in enumerate(documents):
        where = positions[document]
        require(
            fill < 0 or ids.shape[2] > 1 or len(where) == int(where[-1]) + 1,
            f"document {row} has positions without a record, which zeros cannot say with k = 1: "
            "use the form nemo",
            TraceError,
        )
        batch[row, where] = ids[document]
        mask[row, : where[-1] + 1] = 1
        tokens[row, where] = trace.tokens.numpy()[document]
    arrays = {"routed_experts": batch, "attention_mask": mask}
    return arrays | ({"input_ids": tokens} if has_tokens else {})
