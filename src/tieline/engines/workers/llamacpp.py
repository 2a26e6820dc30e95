"""Worker for llama.cpp: a callback reads the tensors that the router of each layer computes.

`cb_eval` of a context is called before and after each node of the graph. Of layer L it reads

    ffn_moe_logits-L          (T, E) the router's scores
    ffn_moe_probs_biased-L    (T, E) what is ranked in their place, in families with a bias
    ffn_moe_probs_masked-L    (T, E) the same with experts of other groups masked
    ffn_moe_topk-L            (T, k) the choice, a view with strides of its own
    ffn_moe_weights-L         (T, k) weights; if _softmax, _norm or _scaled follow, they replace it

Each document is decoded separately from an empty cache, in one batch, with logits of all tokens:
the last layer computes no other tokens. Sizes of structures are those of llama-cpp-python, which
may differ from those of another libllama; implausible defaults of a context raise an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCORES = ("ffn_moe_probs_masked", "ffn_moe_probs_biased", "ffn_moe_logits")
"""Names of the tensors that a router may rank, the last step first."""
WEIGHTS = (
    "ffn_moe_weights_scaled",
    "ffn_moe_weights_norm",
    "ffn_moe_weights_softmax",
    "ffn_moe_weights",
)
"""Names of combine weights, the last step first."""
PICKS = "ffn_moe_topk"
ROUTER_TENSORS = frozenset((*SCORES, *WEIGHTS, PICKS))

PLAUSIBLE = {
    "n_ctx": range(1 << 20),
    "n_batch": range(1, 1 << 20),
    "n_ubatch": range(1, 1 << 20),
    "n_seq_max": range(1, 257),
    "n_threads": range(1, 1025),
    "flash_attn_type": range(-1, 2),
    "type_k": range(64),
    "type_v": range(64),
}
"""Ranges of a context's defaults in every release; other values show another structure layout."""

NUMBERS = {0: "float32", 26: "int32"}
"""NumPy types of the ggml types that routers compute in."""

FORMATS = {
    "F32": ("fp32", "fp32"),
    "F16": ("fp16", "tf32"),
    "BF16": ("bf16", "bf16_in"),
    "Q8": ("int8", "int8"),
    "Q6": ("int8_group", "int8_group"),
    "Q": ("int4_group", "int4_group"),
    "IQ": ("int4_group", "int4_group"),
    "MX": ("int4_group", "int4_group"),
}
"""Storage format of tensors and number format with the noise of their products, by ggml type.

Inputs of a product are rounded to the type of the weights and summed in float32: F16 keeps ten bits
of mantissa as TensorFloat-32 does, Q8_0 rounds activations to 8 bits too.
"""
ROUTER = "ffn_gate_inp"
GATING = {1: "softmax", 2: "sigmoid"}
"""Units of a router's probabilities by `expert_gating_func` of a GGUF."""


class _MissingFunction:
    """Stands for a function that a library lacks: it can be declared but not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError(f"this libllama has no {self.__name__}")


class _LenientLibrary(ctypes.CDLL):
    """A library that may lack functions that its bindings declare."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return _MissingFunction(name)


@contextlib.contextmanager
def _lenient_libraries() -> Iterator[None]:
    """Let libraries that are loaded in the block lack functions."""
    strict, ctypes.CDLL = ctypes.CDLL, _LenientLibrary  # type: ignore[misc]
    try:
        yield
    finally:
        ctypes.CDLL = strict  # type: ignore[misc]


def load_libraries() -> tuple[Any, Any]:
    """Load the bindings of llama.cpp, the library of its tensors and the backends."""
    with _lenient_libraries():
        llama = importlib.import_module("llama_cpp")
    library = Path(llama.llama_cpp._lib._name)
    folder, suffix = library.parent, library.suffix
    base = ctypes.CDLL(str(folder / f"libggml-base{suffix}"))
    base.ggml_get_name.restype = ctypes.c_char_p
    base.ggml_get_name.argtypes = [ctypes.c_void_p]
    base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p] + [
        ctypes.c_size_t
    ] * 2
    backends = ctypes.CDLL(str(folder / f"libggml{suffix}"))
    backends.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    backends.ggml_backend_load_all_from_path(str(folder).encode())
    return llama, base


class TensorHead(ctypes.Structure):
    """The first fields of a ggml tensor: sizes and strides in bytes, fastest axis first."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    ]


def read_tensor(address: int, fetch: Callable[[int, int, int, int], None]) -> Any:
    """Copy a tensor to an array with four axes, the slowest first, by its strides.

    Args:
        address: address of the tensor.
        fetch: copies bytes of the tensor's memory; arguments (tensor, target, offset, size).
    """
    import numpy as np

    head = TensorHead.from_address(address)
    if head.type not in NUMBERS:
        raise RuntimeError(f"a router's tensor has type {head.type} of ggml, not {NUMBERS}")
    kind = np.dtype(NUMBERS[head.type])
    shape = [head.ne[axis] for axis in (3, 2, 1, 0)]
    strides = [head.nb[axis] for axis in (3, 2, 1, 0)]
    span = 0
    if all(shape):
        span = kind.itemsize + sum((shape[axis] - 1) * strides[axis] for axis in range(4))
    data = np.empty(span, np.uint8)
    if span:
        fetch(address, data.ctypes.data, 0, span)
    view = np.ndarray(shape, kind, data if span else None, 0, strides if span else None)
    return view.copy()


class LlamaRecorder:
    """Callback that copies the routers' tensors, by name and layer.

    Args:
        name_of: returns the name of a tensor by its address.
        read: returns the array of a tensor by its address.
    """

    def __init__(self, name_of: Callable[[int], bytes], read: Callable[[int], Any]) -> None:
        self._name_of, self._read = name_of, read
        self.tensors: dict[tuple[str, int], Any] = {}
        self.problem: BaseException | None = None

    def __call__(self, tensor: int, ask: bool, _: Any) -> bool:
        """Return whether a tensor is wanted (`ask`), or copy it; False ends the computation."""
        try:
            base, _, layer = self._name_of(tensor).decode(errors="replace").rpartition("-")
            routes = base in ROUTER_TENSORS and layer.isdigit()
            if ask:
                return routes
            if routes:
                self.tensors[base, int(layer)] = self._read(tensor)
            return True
        except BaseException as problem:  # the library would ignore it
            self.problem = problem
            return False

    def take_document(self, count: int) -> dict[str, Any]:
        """Return and clear the arrays (T, L, ...) of a document; raises errors of the callback."""
        if self.problem is not None:
            raise self.problem
        tensors, self.tensors = self.tensors, {}
        return stacked_layers(
            {key: rows_per_token(key, tensor, count) for key, tensor in tensors.items()}
        )


def rows_per_token(key: tuple[str, int], tensor: Any, count: int) -> Any:
    """Reshape a tensor to a row per token, the slowest axis of a router's tensors."""
    if tensor.size == 0 or tensor.size % count:
        raise engine_error(
            f"llama.cpp gave {tensor.size} numbers of {key[0]}-{key[1]} for {count} tokens"
        )
    return tensor.reshape(count, -1)


def stacked_layers(tensors: dict[tuple[str, int], Any]) -> dict[str, Any]:
    """Stack picks, scores and weights to (T, L, ...), with layer numbers and tensor names."""
    import numpy as np

    layers = sorted({layer for name, layer in tensors if name == PICKS})
    if not layers:
        raise engine_error(
            "this model has no router that llama.cpp shows: no ffn_moe_topk in its graph"
        )

    def last_step(names: tuple[str, ...]) -> str | None:
        return next((x for x in names if all((x, layer) in tensors for layer in layers)), None)

    arrays: dict[str, Any] = {
        "layers": layers,
        "scores": last_step(SCORES),
        "weights_name": last_step(WEIGHTS),
    }
    arrays["picks"] = np.stack([tensors[PICKS, layer] for layer in layers], 1)
    for key, name in (("logits", arrays["scores"]), ("weights", arrays["weights_name"])):
        if name is not None:
            arrays[key] = np.stack([tensors[name, layer] for layer in layers], 1)
    return arrays


def engine_error(message: str) -> Exception:
    """Return an error whose message is reported without its type."""
    return type("EngineError", (Exception,), {})(message)


def check_defaults(defaults: Any) -> None:
    """Raise if defaults of a context show another structure layout than the bindings declare."""
    odd = {
        name: int(getattr(defaults, name))
        for name, allowed in PLAUSIBLE.items()
        if int(getattr(defaults, name)) not in allowed
    }
    if odd or bool(defaults.cb_eval) or bool(defaults.cb_eval_user_data):
        raise engine_error(
            f"this libllama is not the one that llama-cpp-python declares: defaults of its context "
            f"are {odd or 'a callback'}; use the library that the bindings were built with"
        )


def capture_log(llama: Any) -> tuple[Any, list[str]]:
    """Collect the library's log; returns the callback, which must be kept alive, and the lines."""
    lines: list[str] = []
    callback = llama.llama_log_callback(
        lambda _level, text, _: lines.append(text.decode(errors="replace"))
    )
    llama.llama_log_set(callback, None)
    return callback, lines


def first_error_line(lines: list[str]) -> str:
    """Return the first line of the library's log that reports an error."""
    log = [line.strip() for line in "".join(lines).splitlines()]
    signs = ("error", "fail", "invalid")
    bad = [line for line in log if any(sign in line.lower() for sign in signs)]
    return (bad or log or [""])[0][:300]


def create_context(
    llama: Any, model: Any, request: dict[str, Any], longest: int, recorder: Any
) -> Any:
    """Create a context for documents of up to `longest` tokens; return it and its settings."""
    options = llama.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = max(longest, 32)
    options.n_threads = options.n_threads_batch = request["threads"]
    options.no_perf = True
    if not request["defaults"]:
        options.flash_attn_type = 0
        options.type_k = options.type_v = 0
    if recorder is not None:
        options.cb_eval = recorder
    context = llama.llama_init_from_model(model, options)
    if not context:
        raise engine_error("llama.cpp could not make a context: not enough memory?")
    kinds = {0: "F32", 1: "F16"}
    settings = {
        "kv": kinds.get(options.type_k, str(options.type_k)),
        "flash attention": {-1: "auto", 0: "off", 1: "on"}[options.flash_attn_type],
        "tokens per pass": options.n_ubatch,
    }
    return context, settings


def document_logits(llama: Any, context: Any, ids: Any, vocabulary: int) -> Any:
    """Return the logits (T, V) of one document, from an empty cache."""
    import numpy as np

    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    count = len(ids)
    batch = llama.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for position, token in enumerate(ids.tolist()):
        batch.token[position], batch.pos[position], batch.n_seq_id[position] = token, position, 1
        batch.seq_id[position][0], batch.logits[position] = 0, True
    code = llama.llama_decode(context, batch)
    llama.llama_batch_free(batch)
    if code != 0:
        raise RuntimeError(f"llama_decode returned {code}")
    logits = llama.llama_get_logits(context)
    return np.ctypeslib.as_array(logits, (count * vocabulary,)).reshape(count, vocabulary)


def log_softmax(logits: Any) -> Any:
    """Return the log-probabilities of logits (T, V), in float32."""
    import numpy as np

    float64_logits = logits.astype(np.float64)
    float64_logits -= float64_logits.max(1, keepdims=True)
    return (float64_logits - np.log(np.exp(float64_logits).sum(1, keepdims=True))).astype(
        np.float32
    )


def open_model(llama: Any, path: str, lines: list[str]) -> Any:
    """Load the model in a GGUF file."""
    options = llama.llama_model_default_params()
    options.n_gpu_layers = 0
    if not Path(path).is_file():
        raise engine_error(f"no such file: {path}")
    model = llama.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise engine_error(f"llama.cpp does not take {path}: {first_error_line(lines)}")
    return model


def check_ids(documents: list[Any], vocabulary: int) -> None:
    """Raise if a token id is not in the model's vocabulary."""
    most = max(int(x.max()) for x in documents)
    if most >= vocabulary:
        raise engine_error(
            f"token {most} is not in this GGUF, which has {vocabulary} tokens: it is of another "
            "model than the tokens"
        )


def token_texts(llama: Any, vocab: Any, ids: list[int]) -> list[str]:
    """Return the text of each token id."""
    get = llama.llama_vocab_get_text
    return [(get(vocab, token) or b"").decode(errors="replace") for token in ids]


class LoadedModel:
    """A model in memory with its vocabulary, recorder and the callbacks that must be kept alive."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.llama, self.base = load_libraries()
        check_defaults(self.llama.llama_context_default_params())
        self.log_callback, lines = capture_log(self.llama)
        self.llama.llama_backend_init()
        self.model = open_model(self.llama, request["model"], lines)
        self.vocab = self.llama.llama_model_get_vocab(self.model)
        self.vocabulary = int(self.llama.llama_vocab_n_tokens(self.vocab))
        fetch = self.base.ggml_backend_tensor_get
        self.recorder = LlamaRecorder(self.base.ggml_get_name, lambda x: read_tensor(x, fetch))
        self.callback = self.llama.llama_cpp.ggml_backend_sched_eval_callback(self.recorder)


def run(request: dict[str, Any], documents: list[Any], on_document: Callable[[int], None]) -> Any:
    """Run the documents, or read the weights of the file, and return arrays and facts."""
    if request["job"] == "weights":
        return dequantised_weights(request)
    started = time.perf_counter()
    loaded_model = LoadedModel(request)
    llama, recorder = loaded_model.llama, loaded_model.recorder
    check_ids(documents, loaded_model.vocabulary)
    longest = max(map(len, documents))
    context, settings = create_context(
        llama, loaded_model.model, request, longest, loaded_model.callback
    )
    ready, captures = time.perf_counter(), []
    for number, ids in enumerate(documents):
        logits = document_logits(llama, context, ids, loaded_model.vocabulary)
        capture = recorder.take_document(len(ids))
        if request["logprobs"]:
            capture["logprobs"] = log_softmax(logits)
        captures.append(capture)
        on_document(number + 1)
    timings = {"load": ready - started, "run": time.perf_counter() - ready}
    library = str(llama.llama_cpp._lib._name)
    return concatenated_captures(captures), {
        **run_facts(request, captures[0], settings, library),
        "timings": timings,
        "vocabulary": loaded_model.vocabulary,
        "words": token_texts(llama, loaded_model.vocab, request["words"]),
        "versions": {"llama-cpp-python": llama.__version__},
    }


def timing_runs(request: dict[str, Any], documents: list[Any]) -> dict[str, Callable[[], None]]:
    """Return functions that run all documents without and with the callback, to be timed."""
    loaded_model, longest = LoadedModel(request), max(map(len, documents))

    def make_run(callback: Any) -> Callable[[], None]:
        context, _ = create_context(
            loaded_model.llama, loaded_model.model, request, longest, callback
        )

        def run_all_documents() -> None:
            for ids in documents:
                document_logits(loaded_model.llama, context, ids, loaded_model.vocabulary)
                if callback is not None:
                    loaded_model.recorder.take_document(len(ids))

        return run_all_documents

    return {"plain": make_run(None), "captured": make_run(loaded_model.callback)}


def concatenated_captures(captures: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate the arrays of all documents."""
    import numpy as np

    names = [x for x in ("picks", "logits", "weights", "logprobs") if x in captures[0]]
    return {name: np.concatenate([capture[name] for capture in captures]) for name in names}


def run_facts(
    request: dict[str, Any], first: dict[str, Any], settings: dict[str, Any], library: str
) -> Any:
    """Return layer names, units, formats and settings of a run."""
    kinds = gguf_facts(request["model"])
    coarse = kinds["rounding"] == "fp32" and settings["kv"] == "F16"  # keys and values are rounded
    return {
        "layers": [f"model.layers.{layer}.mlp.gate" for layer in first["layers"]],
        "units": score_units(first["scores"], kinds["gating"], first.get("logits")),
        "dtype": kinds["dtype"],
        "rounding": "fp16" if coarse else kinds["rounding"],
        "rounded": "cache" if coarse else "products",
        "router": kinds["router"],
        "bits": kinds["bits"],
        "architecture": kinds["architecture"],
        "settings": {
            **settings,
            "library": library,
            "tensors": kinds["tensors"],
            "ranked": first["scores"],
        },
    }


def score_units(ranked: str | None, gating: int, values: Any) -> str:
    """Return the units of a router's scores: as the file states, else sigmoid if a value exceeds 1.

    Softmax families have no correction bias; added to sigmoids, it makes values above 1.
    """
    if ranked in (None, "ffn_moe_logits"):
        return "logits"
    return GATING.get(gating, "softmax" if values.max() <= 1.0 + 1e-6 else "sigmoid")


def gguf_facts(path: str) -> dict[str, Any]:
    """Return tensor types, bits per weight, dominant formats and architecture of a GGUF."""
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(path)
    sizes: dict[str, int] = {}
    for tensor in reader.tensors:
        name = tensor.tensor_type.name
        sizes[name] = sizes.get(name, 0) + int(tensor.n_elements)
    bits = 8 * sum(int(x.n_bytes) for x in reader.tensors) / sum(sizes.values())
    most = max(sizes, key=lambda name: sizes[name])
    fits = [kinds for head, kinds in FORMATS.items() if most.startswith(head)]
    dtype, rounding = fits[0] if fits else (most, most)
    routers = {x.tensor_type.name for x in reader.tensors if ROUTER in x.name}
    field = reader.get_field("general.architecture")
    architecture = str(field.contents()) if field else ""
    gating = reader.get_field(f"{architecture}.expert_gating_func")
    return {
        "bits": bits,
        "tensors": {name: sizes[name] for name in sorted(sizes)},
        "dtype": dtype,
        "rounding": rounding,
        "router": "fp32" if routers == {"F32"} else rounding,
        "architecture": architecture,
        "gating": int(gating.contents()) if gating else 0,
    }


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
"""Name of one expert's matrix in a checkpoint; GGUF stacks the experts of a layer."""


def dequantised_weights(request: dict[str, Any]) -> Any:
    """Return the tensors with these names of a checkpoint, dequantised to float32, and facts."""
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(request["model"])
    kinds, tensors = gguf_facts(request["model"]), {x.name: x for x in reader.tensors}
    architecture = kinds["architecture"]
    arches = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    blocks = int(reader.get_field(f"{architecture}.block_count").contents())
    names = gguf.get_tensor_name_map(arches[architecture], blocks)
    heads = {
        "q_proj": int(reader.get_field(f"{architecture}.attention.head_count").contents()),
        "k_proj": int(reader.get_field(f"{architecture}.attention.head_count_kv").contents()),
    }
    cache: dict[str, Any] = {}
    arrays, unquantised = {}, {}
    for name in request["names"]:
        stacked_name, expert = stacked_gguf_name(name)
        stored = names.get_name(stacked_name, try_suffixes=(".weight", ".bias"))
        if stored not in tensors:
            raise engine_error(
                f"{request['model']} has no {name} ({stored}): it is of another model"
            )
        if stored not in cache:
            tensor = tensors[stored]
            flat = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            cache = {stored: flat.reshape([int(n) for n in reversed(tensor.shape)])}
        value = cache[stored] if expert is None else cache[stored][expert]
        kind = name.split(".")[-2]
        if architecture == "llama" and kind in heads:
            value = uninterleaved_rows(value, heads[kind])
        arrays[name] = value.astype("float32")
        if tensors[stored].tensor_type.name in UNQUANTISED:
            unquantised[name] = tensors[stored].tensor_type.name
    facts = {name: kinds[name] for name in ("bits", "tensors", "dtype")}
    return arrays, {**facts, "unquantised": unquantised}


UNQUANTISED = ("F32", "F16", "BF16")
"""Types of tensors that are not quantised."""


def stacked_gguf_name(name: str) -> tuple[str, int | None]:
    """Return stacked name and number of an expert's matrix; other names unchanged, and None."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return name, None
    return f"{match[1]}.{match[3]}.weight", int(match[2])


def uninterleaved_rows(weight: Any, heads: int) -> Any:
    """Reorder rows of a query or key matrix as in checkpoints: llama's GGUF interleaves halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)
