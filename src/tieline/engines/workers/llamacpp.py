"""Worker for llama.cpp: a callback sees every tensor that the router of a layer computes.

`cb_eval` of a context is asked before and called after each node of the graph. Of layer L it reads

    ffn_moe_logits-L          (T, E) the router's scores
    ffn_moe_probs_biased-L    (T, E) what is ranked in their place, in families with a bias
    ffn_moe_probs_masked-L    (T, E) the same with experts of other groups masked
    ffn_moe_topk-L            (T, k) the choice, a view with strides of its own
    ffn_moe_weights-L         (T, k) weights; _softmax, _norm and _scaled replace it if they follow

Each document is decoded by itself from an empty cache, in one piece, with logits of all tokens: a
last layer computes no others. Sizes of structures are those of llama-cpp-python, which may not be
those of another libllama; a context whose defaults are implausible is refused.
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
"""Names of what a router ranks, the last step first."""
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
"""Defaults of a context in every release; others show that the structure is laid out otherwise."""

NUMBERS = {0: "float32", 26: "int32"}
"""Types of ggml that routers compute in."""

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
"""The format that tensors are stored in and the one whose noise their products make, by name.

Inputs of a product are rounded to the type of the weights and summed in float32: F16 keeps ten bits
of mantissa as TensorFloat-32 does, Q8_0 rounds activations to 8 bits too.
"""
ROUTER = "ffn_gate_inp"
GATING = {1: "softmax", 2: "sigmoid"}
"""Units of a router's probabilities by `expert_gating_func` of a GGUF."""


class _Missing:
    """A function that a library lacks: can be declared, not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError(f"this libllama has no {self.__name__}")


class _Lenient(ctypes.CDLL):
    """A library that may lack functions its bindings declare."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return _Missing(name)


@contextlib.contextmanager
def _lenient() -> Iterator[None]:
    strict, ctypes.CDLL = ctypes.CDLL, _Lenient  # type: ignore[misc]
    try:
        yield
    finally:
        ctypes.CDLL = strict  # type: ignore[misc]


def libraries() -> tuple[Any, Any]:
    """The bindings of llama.cpp and the library of its tensors, backends loaded."""
    with _lenient():
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


class Head(ctypes.Structure):
    """The first fields of a tensor of ggml: sizes and strides in bytes, fastest axis first."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    ]


def read_tensor(address: int, fetch: Callable[[int, int, int, int], None]) -> Any:
    """A copy of a tensor with four axes, the slowest first, strides honoured.

    Args:
        address: of the tensor.
        fetch: copies (tensor, to, offset, size) bytes out of the tensor's memory.
    """
    import numpy as np

    head = Head.from_address(address)
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
    """Copies of the routers' tensors, by name and layer.

    Args:
        name_of: the name of a tensor by its address.
        read: the array of a tensor by its address.
    """

    def __init__(self, name_of: Callable[[int], bytes], read: Callable[[int], Any]) -> None:
        self._name_of, self._read = name_of, read
        self.tensors: dict[tuple[str, int], Any] = {}
        self.problem: BaseException | None = None

    def __call__(self, tensor: int, ask: bool, _: Any) -> bool:
        """Select the tensors of routers and copy them; an error ends the computation."""
        try:
            base, _, layer = self._name_of(tensor).decode(errors="replace").rpartition("-")
            routes = base in ROUTER_TENSORS and layer.isdigit()
            if ask:
                return routes
            if routes:
                self.tensors[base, int(layer)] = self._read(tensor)
            return True
        except BaseException as problem:  # it would be swallowed by the library
            self.problem = problem
            return False

    def take(self, count: int) -> dict[str, Any]:
        """Arrays (T, L, ...) of one document of T tokens; raises what the callback met."""
        if self.problem is not None:
            raise self.problem
        tensors, self.tensors = self.tensors, {}
        return stacked({key: in_rows(key, tensor, count) for key, tensor in tensors.items()})


def in_rows(key: tuple[str, int], tensor: Any, count: int) -> Any:
    """A row per token: tokens are the slowest axis that a router's tensor has."""
    if tensor.size == 0 or tensor.size % count:
        raise error(f"llama.cpp gave {tensor.size} numbers of {key[0]}-{key[1]} for {count} tokens")
    return tensor.reshape(count, -1)


def stacked(tensors: dict[tuple[str, int], Any]) -> dict[str, Any]:
    """Picks, scores and weights (T, L, ...) with the numbers of the layers and the scores' name."""
    import numpy as np

    layers = sorted({layer for name, layer in tensors if name == PICKS})
    if not layers:
        raise error("this model has no router that llama.cpp shows: no ffn_moe_topk in its graph")

    def last(names: tuple[str, ...]) -> str | None:
        return next((x for x in names if all((x, layer) in tensors for layer in layers)), None)

    arrays: dict[str, Any] = {"layers": layers, "scores": last(SCORES), "of": last(WEIGHTS)}
    arrays["picks"] = np.stack([tensors[PICKS, layer] for layer in layers], 1)
    for key, name in (("logits", arrays["scores"]), ("weights", arrays["of"])):
        if name is not None:
            arrays[key] = np.stack([tensors[name, layer] for layer in layers], 1)
    return arrays


def error(message: str) -> Exception:
    """Return an error that is reported without its type."""
    return type("EngineError", (Exception,), {})(message)


def check_defaults(defaults: Any) -> None:
    """Refuse a libllama whose context is laid out otherwise than the bindings declare."""
    odd = {
        name: int(getattr(defaults, name))
        for name, allowed in PLAUSIBLE.items()
        if int(getattr(defaults, name)) not in allowed
    }
    if odd or bool(defaults.cb_eval) or bool(defaults.cb_eval_user_data):
        raise error(
            f"this libllama is not the one that llama-cpp-python declares: defaults of its context "
            f"are {odd or 'a callback'}; use the library that the bindings were built with"
        )


def quiet(llama: Any) -> tuple[Any, list[str]]:
    """A callback that keeps the library's log; it must live as long as the library runs."""
    lines: list[str] = []
    kept = llama.llama_log_callback(
        lambda _level, text, _: lines.append(text.decode(errors="replace"))
    )
    llama.llama_log_set(kept, None)
    return kept, lines


def complaint(lines: list[str]) -> str:
    """Return the first line of the library's log that reports an error."""
    log = [line.strip() for line in "".join(lines).splitlines()]
    bad = [line for line in log if "error" in line.lower() or "fail" in line.lower()]
    return (bad or log or [""])[0][:300]


def context_of(llama: Any, model: Any, request: dict[str, Any], longest: int, recorder: Any) -> Any:
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
        raise error("llama.cpp could not make a context: not enough memory?")
    kinds = {0: "F32", 1: "F16"}
    settings = {
        "kv": kinds.get(options.type_k, str(options.type_k)),
        "flash attention": {-1: "auto", 0: "off", 1: "on"}[options.flash_attn_type],
        "tokens per pass": options.n_ubatch,
    }
    return context, settings


def decode(llama: Any, context: Any, ids: Any, vocabulary: int) -> Any:
    """Logits (T, V) of one document, from an empty cache."""
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
    """Log-probabilities in float32 of logits (T, V)."""
    import numpy as np

    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(1, keepdims=True))).astype(np.float32)


def open_model(llama: Any, path: str, lines: list[str]) -> Any:
    """The model in a GGUF file."""
    options = llama.llama_model_default_params()
    options.n_gpu_layers = 0
    if not Path(path).is_file():
        raise error(f"no such file: {path}")
    model = llama.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise error(f"llama.cpp does not take {path}: {complaint(lines)}")
    return model


def check_ids(documents: list[Any], vocabulary: int) -> None:
    """Refuse ids that the model has no embedding for."""
    most = max(int(x.max()) for x in documents)
    if most >= vocabulary:
        raise error(
            f"token {most} is not in this GGUF, which has {vocabulary} tokens: it is of another "
            "model than the tokens"
        )


def token_texts(llama: Any, vocab: Any, ids: list[int]) -> list[str]:
    """The text of some tokens."""
    get = llama.llama_vocab_get_text
    return [(get(vocab, token) or b"").decode(errors="replace") for token in ids]


class Opened:
    """A model in memory with its vocabulary and what must live as long as it does."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.llama, self.base = libraries()
        check_defaults(self.llama.llama_context_default_params())
        self.kept, lines = quiet(self.llama)
        self.llama.llama_backend_init()
        self.model = open_model(self.llama, request["model"], lines)
        self.vocab = self.llama.llama_model_get_vocab(self.model)
        self.vocabulary = int(self.llama.llama_vocab_n_tokens(self.vocab))
        fetch = self.base.ggml_backend_tensor_get
        self.recorder = LlamaRecorder(self.base.ggml_get_name, lambda x: read_tensor(x, fetch))
        self.callback = self.llama.llama_cpp.ggml_backend_sched_eval_callback(self.recorder)


def run(request: dict[str, Any], documents: list[Any], tell: Callable[[int], None]) -> Any:
    """Arrays and facts of the documents, or the weights of the file."""
    if request["job"] == "weights":
        return weights(request)
    started = time.perf_counter()
    opened = Opened(request)
    llama, recorder = opened.llama, opened.recorder
    check_ids(documents, opened.vocabulary)
    longest = max(map(len, documents))
    context, settings = context_of(llama, opened.model, request, longest, opened.callback)
    loaded, captures = time.perf_counter(), []
    for number, ids in enumerate(documents):
        logits = decode(llama, context, ids, opened.vocabulary)
        capture = recorder.take(len(ids))
        if request["logprobs"]:
            capture["logprobs"] = log_softmax(logits)
        captures.append(capture)
        tell(number + 1)
    timings = {"load": loaded - started, "run": time.perf_counter() - loaded}
    library = str(llama.llama_cpp._lib._name)
    return joined(captures), {
        **facts_of(request, captures[0], settings, library),
        "timings": timings,
        "vocabulary": opened.vocabulary,
        "words": token_texts(llama, opened.vocab, request["words"]),
        "versions": {"llama-cpp-python": llama.__version__},
    }


def timing_runs(request: dict[str, Any], documents: list[Any]) -> dict[str, Callable[[], None]]:
    """Runs over all documents without and with the callback, each in a context of its own."""
    opened, longest = Opened(request), max(map(len, documents))

    def timing_run(callback: Any) -> Callable[[], None]:
        context, _ = context_of(opened.llama, opened.model, request, longest, callback)

        def go() -> None:
            for ids in documents:
                decode(opened.llama, context, ids, opened.vocabulary)
                if callback is not None:
                    opened.recorder.take(len(ids))

        return go

    return {"plain": timing_run(None), "captured": timing_run(opened.callback)}


def joined(captures: list[dict[str, Any]]) -> dict[str, Any]:
    """The arrays of all documents, one after the other."""
    import numpy as np

    names = [x for x in ("picks", "logits", "weights", "logprobs") if x in captures[0]]
    return {name: np.concatenate([capture[name] for capture in captures]) for name in names}


def facts_of(
    request: dict[str, Any], first: dict[str, Any], settings: dict[str, Any], library: str
) -> Any:
    """What the arrays mean."""
    kinds = tensor_kinds(request["model"])
    coarse = kinds["rounding"] == "fp32" and settings["kv"] == "F16"  # keys and values are rounded
    return {
        "layers": [f"model.layers.{layer}.mlp.gate" for layer in first["layers"]],
        "units": units_of(first["scores"], kinds["gating"], first.get("logits")),
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


def units_of(ranked: str | None, gating: int, values: Any) -> str:
    """Units of what a router ranks: as the file says, else by whether a value exceeds 1.

    A bias of the choice is added to sigmoids, which softmax families do not have.
    """
    if ranked in (None, "ffn_moe_logits"):
        return "logits"
    return GATING.get(gating, "softmax" if values.max() <= 1.0 + 1e-6 else "sigmoid")


def tensor_kinds(path: str) -> dict[str, Any]:
    """Types of the tensors in a GGUF, the bits per weight they make, and the format of most."""
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
"""One expert's matrix in a checkpoint; GGUF stacks those of a layer."""


def weights(request: dict[str, Any]) -> Any:
    """The tensors that a checkpoint calls by these names, dequantised to float32."""
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(request["model"])
    kinds, tensors = tensor_kinds(request["model"]), {x.name: x for x in reader.tensors}
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
            raise error(f"{request['model']} has no {name} ({stored}): it is of another model")
        if stored not in cache:
            tensor = tensors[stored]
            flat = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            cache = {stored: flat.reshape([int(n) for n in reversed(tensor.shape)])}
        value = cache[stored] if expert is None else cache[stored][expert]
        kind = name.split(".")[-2]
        if architecture == "llama" and kind in heads:
            value = halves(value, heads[kind])
        arrays[name] = value.astype("float32")
        if tensors[stored].tensor_type.name in UNQUANTISED:
            unquantised[name] = tensors[stored].tensor_type.name
    facts = {name: kinds[name] for name in ("bits", "tensors", "dtype")}
    return arrays, {**facts, "unquantised": unquantised}


UNQUANTISED = ("F32", "F16", "BF16")
"""Formats of tensors that are stored as they are."""


def stacked_gguf_name(name: str) -> tuple[str, int | None]:
    """The stacked name of an expert's matrix and the expert's number; other names as they are."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return name, None
    return f"{match[1]}.{match[3]}.weight", int(match[2])


def halves(weight: Any, heads: int) -> Any:
    """Rows of a query or key matrix in the order of checkpoints: llama's GGUF interleaves them."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)
