"""Recognise the format of a file of routes by its content, and call its reader.

    array           an array (tokens, layers, k), and arrays of the same tokens
    verl, nemo      a batch (sequences, length, layers, k); zeros or -1 where nothing was routed
    slime, miles    samples with rollout_routed_experts
    vllm            answers with choices[].routed_experts
    tensorrt-llm    the same fields as vllm, so that it must be named
    sglang          answers with meta_info.routed_experts
    megatron        answers with choices[].moe_topk_indices
    megatron-trace  router_trace_rank*.jsonl, or the folder of them
    moe-trace       a CSV of layer,expert
    table           a CSV or JSONL of layer, token, experts[, scores]
    log             a CSV or JSONL with other recognisable columns, as vLLM hooks write it
    moe-atlas       objects with activations: layer, token_idx, expert_idx, gate_weight
    torch           a .pt of tensors, or a folder with one per layer
    imatrix         counts of llama.cpp: the load of each expert, without routes

JSON, logs and tables may be packed by gzip. Pickles raise an error, since reading one runs code of
the file; a .pt of plain tensors is read without running any.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tieline.core.errors import TraceError, naming_unparsable_file, require
from tieline.core.files import require_file
from tieline.core.plugins import import_added
from tieline.core.untrusted_input import GZIP_MAGIC, NPY_MAGIC, file_advice, open_unpacked
from tieline.trace.readers.array_files import (
    csv_head,
    is_json_text,
    read_arrays,
    read_json_values,
)
from tieline.trace.readers.array_routes import (
    TORCH_FILES,
    array_routes,
    is_torch_file,
    read_array_file,
    refuse_pickle,
    torch_routes,
)
from tieline.trace.readers.completions import (
    ROLLOUT_FIELD,
    SGLANG_BOXES,
    completion_routes,
    json_field,
    rollout_routes,
    sglang_routes,
)
from tieline.trace.readers.logs import (
    atlas_routes,
    log_format,
    log_routes,
    recognised_columns,
)
from tieline.trace.readers.megatron import TRACE_FILES, megatron_routes
from tieline.trace.readers.moe_trace_and_imatrix import (
    GGUF_MAGIC,
    MOE_TRACE_HEADER,
    moe_trace_routes,
)
from tieline.trace.readers.routes import Routes, routes_of_trace, routes_with_tokens
from tieline.trace.readers.table_files import TABLE_SUFFIXES, has_table_columns, import_table
from tieline.trace.record import RoutingTrace

FORMATS = (
    "array",
    "verl",
    "nemo",
    "slime",
    "miles",
    "vllm",
    "tensorrt-llm",
    "sglang",
    "megatron",
    "megatron-trace",
    "moe-trace",
    "table",
    "log",
    "moe-atlas",
    "torch",
    "imatrix",
)
ARRAY_FORMATS = {"array", "verl", "nemo", "slime", "miles"}
SUFFIXES = (
    ".npy",
    ".npz",
    ".safetensors",
    ".csv",
    ".tsv",
    ".json",
    ".jsonl",
    ".gguf",
    ".pt",
    ".gz",
)
LOG_READERS = {"log": log_routes, "moe-atlas": atlas_routes}
_NPY_BASE64_START = "k05VTVBZ"
_HEAD_BYTES = 1 << 20


READERS: "dict[str, Callable[[Path, ReadOptions], Routes]]" = {}
"""Readers of registered formats, beside those of `FORMATS`, by name of the format."""


def register_reader(name: str, read: "Callable[[Path, ReadOptions], Routes]") -> None:
    """Register a reader for a further format; raises if the name is taken.

    Args:
        name: name of the format for `--format` and `import_trace(format=...)`.
        read: returns the routes in a file; raises a `TraceError` if the file is malformed.
    """
    require(name not in (*FORMATS, *READERS), f"there is a format {name!r} already")
    READERS[name] = read


@dataclass(frozen=True)
class ReadOptions:
    """What a file of routes may not state itself.

    Attributes:
        format: name of the format; by default it is recognised.
        n_experts: number of experts E.
        k: experts chosen per token, for tables, SGLang and moe-trace.
        layers: number of layers of the array, for SGLang.
        start: position of the first row of a request.
        tokens: token ids of each document.
    """

    format: str | None = None
    n_experts: int | None = None
    k: int | None = None
    layers: int | None = None
    start: int | None = None
    tokens: tuple[np.ndarray, ...] | None = None

    def __post_init__(self) -> None:
        if self.format is None or self.format in FORMATS:
            return
        import_added("readers")
        formats = (*FORMATS, *READERS)
        message = f"no format is called {self.format!r:.40}; there are {', '.join(formats)}"
        require(self.format in formats, message, TraceError)


def recognise_format(path: str | Path) -> str:
    """Return the format of a file or folder, by its first bytes and the names of its fields."""
    file = Path(path)
    if file.is_dir():
        return _folder_format(file)
    require_file(file, TraceError)
    _refuse_model_file(file)
    with naming_unparsable_file(file), open_unpacked(file) as stream:
        head = stream.read(_HEAD_BYTES)
    require(bool(head.strip()), f"{file}: is empty; a file of routes was expected", TraceError)
    packed = _is_gzip(file)
    if not packed and is_torch_file(file):
        return "torch"
    refuse_pickle(file, head)
    if head[:4] == GGUF_MAGIC:
        return "imatrix"
    if head[:6] == NPY_MAGIC or head[:2] == b"PK" or file.suffix.lower() == ".safetensors":
        return "array"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file.stat().st_size:
        return "array"  # a safetensors file under another name
    if file.suffix.lower() in (".npy", ".npz"):
        return "array"  # which will say what is wrong with it
    first = head.lstrip()[:1]
    if first in (b"{", b"["):
        return _json_file_format(file, head, packed)
    line = head.split(b"\n", 1)[0].strip().decode("utf-8", "replace").split(",")
    digits = len(line) == 2 and all(cell.isdecimal() for cell in line)
    if line == MOE_TRACE_HEADER or digits:
        return "moe-trace"
    names, _ = csv_head(head)
    is_table = file.suffix.lower() in TABLE_SUFFIXES
    if not (is_table and not packed and has_table_columns(names)) and log_format(head, str(file)):
        return "log"
    require(
        is_table or "experts" in names,
        f"{file}: is in none of the formats {', '.join(FORMATS)}; name one with --format",
        TraceError,
    )
    return "table"


def _refuse_model_file(file: Path) -> None:
    """Raise if a file holds the weights of a model."""
    beside = file.suffix == ".safetensors" and (file.parent / "config.json").is_file()
    of_model = beside and file.name.startswith(("model.", "model-"))
    require(not of_model, file_advice(file), TraceError)


def _folder_format(folder: Path) -> str:
    """Return the format of a folder of routes; raises if it holds none."""
    if any(folder.glob(TORCH_FILES)):
        return "torch"
    has_traces = any(folder.glob(TRACE_FILES))
    message = f"{folder}: a folder without {TRACE_FILES} or {TORCH_FILES} holds no routes"
    require(has_traces, message, TraceError)
    return "megatron-trace"


def _is_gzip(file: Path) -> bool:
    """Return whether a file begins as a gzip."""
    with file.open("rb") as stream:
        return stream.read(2) == GZIP_MAGIC


def _json_file_format(file: Path, head: bytes, packed: bool) -> str:
    """Return the format of a JSON file by its first value or lines; raises if it has no routes."""
    line = head.split(b"\n", 1)[0]
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        first = read_json_values(file)[0][1]
    form = _json_value_format(first)
    if form is None or (form == "table" and packed):
        listed = isinstance(first, list) and bool(first) and recognised_columns(first[0])
        form = "log" if listed else log_format(head, str(file))
    if form is None:
        keys = list(first)[:6] if isinstance(first, Mapping) else type(first).__name__
        raise TraceError(
            f"{file}: no field of routes was found (routed_experts, moe_topk_indices, "
            f"rollout_routed_experts, top_indices, activations, or layer, token and experts under "
            f"one of their usual names, such as topk_ids); got {keys}"
        )
    return form


def _json_value_format(value: Any) -> str | None:
    """Return the format of an answer, sample or record by its fields; None without routes."""
    if isinstance(value, list) and value:
        return _json_value_format(value[0])
    if isinstance(value, Mapping):
        if has_table_columns(value):
            return "table"
        if "top_indices" in value:
            return "megatron-trace"
    if json_field(value, ROLLOUT_FIELD) is not None:
        return "slime"
    for item in (value, *_answer_choices(value)):
        if any(
            json_field(json_field(item, box), "routed_experts") is not None for box in SGLANG_BOXES
        ):
            return "sglang"
        if json_field(item, "moe_topk_indices", "prompt_moe_topk_indices") is not None:
            return "megatron"
    for item in (*_answer_choices(value), value):
        routes = json_field(item, "routed_experts")
        if routes is not None:
            raw = isinstance(routes, str) and not routes.startswith(_NPY_BASE64_START)
            return "sglang" if raw else "vllm"
    has = json_field(value, "prompt_routed_experts", "choices", "outputs") is not None
    return "vllm" if has else None


def _answer_choices(value: Any) -> list[Any]:
    """Return the choices of an answer; an empty list if it has none."""
    choices = json_field(value, "choices", "outputs")
    return list(choices) if isinstance(choices, list | tuple) else []


DEFAULT_OPTIONS = ReadOptions()


def read_routes(source: Any, options: ReadOptions = DEFAULT_OPTIONS) -> Routes:
    """Read routes from a file, a folder of Megatron, an array or an answer in memory.

    Args:
        source: a path; an array or tensor (tokens, layers, k); an answer of a server as a mapping;
            or objects of vLLM or TensorRT-LLM (one, or a list).
        options: facts that the source does not state itself.
    """
    if isinstance(source, str | Path):
        routes = _routes_of_file(Path(source), options)
    else:
        routes = _routes_of_object(source, options)
    if options.tokens is not None:
        routes = routes_with_tokens(routes, options.tokens, options.start or 0)
    elif options.start and options.format in (None, *ARRAY_FORMATS) and routes.positions is None:
        routes = replace(routes, positions=np.arange(len(routes.experts)) + options.start)
    if options.n_experts is not None:
        routes = replace(routes, n_experts=options.n_experts)
    return routes


def _routes_of_file(path: Path, options: ReadOptions) -> Routes:
    """Read the routes in a file or folder by the reader of its format."""
    name = options.format or recognise_format(path)
    if name == "torch":
        return torch_routes(path)
    if name != "megatron-trace":
        require_file(path, TraceError)
        with path.open("rb") as stream:
            refuse_pickle(path, stream.read(16))
    if name in READERS:
        return READERS[name](path, options)
    if name in ARRAY_FORMATS and is_json_text(path):
        return rollout_routes(read_json_values(path), str(path))
    if name in ARRAY_FORMATS:
        _refuse_k_of_array(path, options)
        return _with_named_producer(read_array_file(path), options)
    if name == "megatron-trace":
        return megatron_routes(path)
    if name == "moe-trace":
        return moe_trace_routes(path, options.k)
    if name in LOG_READERS:
        return LOG_READERS[name](path)
    if name == "table":
        return routes_of_trace(import_table(path, options.n_experts, options.k), str(path))
    require(
        name != "imatrix",
        f"{path}: a GGUF holds no routes. A model runs in llama.cpp: tieline capture {path} "
        f"--engine llama.cpp, or tieline diff MODEL llama.cpp:{path}. An importance matrix has the "
        "load of experts alone: trace.imatrix_load reads it",
        TraceError,
    )
    return _routes_of_answers(read_json_values(path), name, str(path), options)


def _refuse_k_of_array(path: Path, options: ReadOptions) -> None:
    """Raise if k is given for an array, which holds the chosen experts only."""
    k = options.k
    require(k is None, f"{path}: arrays hold the chosen experts, {k=} cannot be given", TraceError)


def _with_named_producer(routes: Routes, options: ReadOptions) -> Routes:
    """Return the routes with the named format as producer, if one other than "array" is named."""
    return routes if options.format in (None, "array") else replace(routes, producer=options.format)


def _routes_of_answers(
    values: list[tuple[str, Any]], name: str, where: str, options: ReadOptions
) -> Routes:
    """Return the routes of answers or samples in JSON."""
    flat = [
        (label if not isinstance(value, list) else f"{label}: [{number}]", item)
        for label, value in values
        for number, item in enumerate(value if isinstance(value, list) else [value])
    ]
    if name == "sglang":
        return sglang_routes(flat, where, options.layers, options.k, options.start)
    if name in ("slime", "miles"):
        return rollout_routes(flat, where)
    return completion_routes(flat, name, where, options.start)


def _routes_of_object(source: Any, options: ReadOptions) -> Routes:
    """Return the routes of an array, a trace or answers in memory."""
    if isinstance(source, Routes):
        return source
    if isinstance(source, RoutingTrace):
        return routes_of_trace(source, "the trace")
    if isinstance(source, np.ndarray) or hasattr(source, "detach"):
        array = source if isinstance(source, np.ndarray) else source.detach().cpu().numpy()
        return _with_named_producer(array_routes({"routed_experts": array}, "the array"), options)
    if isinstance(source, Mapping) and all(isinstance(x, np.ndarray) for x in source.values()):
        return _with_named_producer(array_routes(source, "the arrays"), options)
    name = options.format or _json_value_format(source)
    if name in (None, "table", "megatron-trace", "log", "torch"):
        kind = type(source).__name__
        raise TraceError(
            f"routes come as a path, an array (tokens, layers, k) or an answer with "
            f"routed_experts, got {kind}"
        )
    values = source if isinstance(source, list) else [source]
    return _routes_of_answers(
        [("the answer", value) for value in values], name, "the answer", options
    )


def read_tokens(path: str | Path) -> tuple[np.ndarray, ...]:
    """Read token ids: one array per document.

    Args:
        path: an .npy of shape (tokens,) or (documents, length); an .npz or .safetensors with
            `tokens` and, for several documents, `documents`; or JSON: a list of ids or of lists.
    """
    file = Path(path)
    require_file(file, TraceError)
    if is_json_text(file):
        return _listed_tokens(read_json_values(file), file)
    arrays = read_arrays(file)
    ids = next((arrays[key] for key in ("tokens", "input_ids", "") if key in arrays), None)
    if ids is None:
        raise TraceError(f"{file}: has no array called tokens")
    fits = ids.ndim in (1, 2) and ids.dtype.kind in "iu" and ids.size > 0
    require(fits, f"{file}: tokens must be integers (tokens,) or (documents, length)", TraceError)
    if ids.ndim == 2:
        mask = arrays.get("attention_mask", np.ones(ids.shape, bool))
        require(mask.shape == ids.shape, f"{file}: attention_mask has another shape", TraceError)
        shown = mask.astype(bool)
        return tuple(np.asarray(ids[row][shown[row]]) for row in range(len(ids)))
    numbers = arrays.get("documents")
    if numbers is None:
        return (np.asarray(ids),)
    fits = numbers.shape == ids.shape
    require(fits, f"{file}: documents must be {ids.shape}, got {numbers.shape}", TraceError)
    _, first = np.unique(numbers, return_index=True)
    return tuple(np.asarray(ids[numbers == numbers[row]]) for row in np.sort(first))


def _listed_tokens(values: list[tuple[str, Any]], file: Path) -> tuple[np.ndarray, ...]:
    """Return the token ids of each document in JSON lists."""
    contents = [value for _, value in values]
    content = contents[0] if len(contents) == 1 else contents
    rows = (
        content
        if isinstance(content, list) and content and isinstance(content[0], list)
        else [content]
    )
    arrays = [np.asarray(row) if isinstance(row, list) else np.zeros(0) for row in rows]
    fits = all(a.ndim == 1 and a.size and a.dtype.kind in "iu" for a in arrays)
    require(fits, f"{file}: tokens must be a list of ids, or a list of such lists", TraceError)
    return tuple(arrays)


def token_documents(tokens: Any) -> tuple[Any, ...] | None:
    """Return token ids of each document, from a file, an array (documents, length) or id lists."""
    if tokens is None:
        return None
    if isinstance(tokens, str | Path):
        return read_tokens(tokens)
    if hasattr(tokens, "detach"):
        tokens = tokens.detach().cpu().numpy()
    nested = len(tokens) > 0 and np.ndim(tokens[0]) == 1
    return tuple(np.asarray(ids) for ids in (tokens if nested else [tokens]))
