"""Worker for vLLM on one process: records logits, weights and choices of every router.

vLLM's routers compute weights and ids from logits in one method, `_compute_routing`, before any
renumbering of experts for load balancing; this worker wraps that method of each router. Each
document is a request that generates one token, so its rows are those of one forward pass: prefix
caching is off, because cached tokens reach no router, and a pass takes a whole document.

The official array (`enable_return_routed_experts`) has ids only, lacks the last token and needs
Triton; files of it are read by `tieline check`, `diff` and `convert`.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
"""Environment variables of the process, unless they are set already."""


def engine_error(message: str) -> Exception:
    """Return an error whose message is reported without its type."""
    return type("EngineError", (Exception,), {})(message)


class VllmRecorder:
    """Records logits, weights and ids of a model's routers, by layer.

    Attributes:
        calls: (logits, weights, ids) of each layer since the last `take_document`.
        ranked: whether the routers rank logits, without a correction bias.
    """

    def __init__(self) -> None:
        self.calls: dict[int, tuple[Any, Any, Any]] = {}
        self.ranked = True

    def watch_router(self, layer: int, router: Any) -> None:
        """Record the calls of one router."""
        compute = router._compute_routing
        bias = getattr(router, "e_score_correction_bias", None)
        self.ranked = self.ranked and bias is None

        def recorded_routing(hidden: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
            weights, ids = compute(hidden, logits, *args, **kwargs)
            self.calls[layer] = tuple(
                x.detach().float().clone() if x.is_floating_point() else x.detach().clone()
                for x in (logits, weights, ids)
            )
            return weights, ids

        router._compute_routing = recorded_routing

    def take_document(self, count: int) -> dict[str, Any]:
        """Return and clear the arrays (T, L, ...) of one document of T tokens."""
        import numpy as np

        calls, self.calls = self.calls, {}
        layers = sorted(calls)
        if not layers:
            raise engine_error("no router of this model ran: is it a Mixture of Experts?")
        rows = {len(ids) for _, _, ids in calls.values()}
        if rows != {count}:
            raise engine_error(f"vLLM routed {sorted(rows)} rows for a document of {count} tokens")
        columns = [np.stack([calls[x][index].numpy() for x in layers], 1) for index in range(3)]
        arrays = {"layers": layers, "weights": columns[1], "picks": columns[2].astype(np.int32)}
        if self.ranked:
            arrays["logits"] = columns[0]
        return arrays


def layer_routers(model: Any) -> list[tuple[int, Any]]:
    """Return layer number and router of every block of experts."""
    pairs = []
    for name, module in model.named_modules():
        router = getattr(module, "router", None)
        if hasattr(router, "_compute_routing"):
            numbers = [segment for segment in name.split(".") if segment.isdigit()]
            pairs.append((int(numbers[0]), router))
    return pairs


def load_engine(request: dict[str, Any], longest: int) -> Any:
    """Load the model in vLLM for documents of up to `longest` tokens."""
    for key, value in SETTINGS.items():
        os.environ.setdefault(key, value)
    os.environ["OMP_NUM_THREADS"] = str(request["threads"])
    vllm = importlib.import_module("vllm")
    dtype = "auto" if request["defaults"] else FORMATS[request["dtype"]]
    return vllm.LLM(
        request["model"],
        dtype=dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=longest + 1,
        max_num_batched_tokens=max(longest, 2048),
        max_num_seqs=1,
        skip_tokenizer_init=True,
        seed=0,
    )


def loaded_module(llm: Any) -> Any:
    """Return the torch module that vLLM runs in this process."""
    executor = llm.llm_engine.model_executor
    return executor.driver_worker.worker.model_runner.model


def run(request: dict[str, Any], documents: list[Any], on_document: Callable[[int], None]) -> Any:
    """Run the documents and return arrays and facts."""
    import numpy as np

    if request["job"] == "weights":
        raise engine_error("the weights that vLLM quantises cannot be read back here")
    started = time.perf_counter()
    llm = load_engine(request, max(map(len, documents)))
    model, recorder = loaded_module(llm), VllmRecorder()
    watched = layer_routers(model)
    for layer, router in watched:
        recorder.watch_router(layer, router)
    states: list[Any] = []
    if request["logprobs"]:
        model.register_forward_hook(lambda _module, _args, out: states.append(out))
    loaded, captures = time.perf_counter(), []
    for number, ids in enumerate(documents):
        run_document(llm, ids)
        capture = recorder.take_document(len(ids))
        if request["logprobs"]:
            capture["logprobs"] = final_logprobs(model, states, len(ids))
        captures.append(capture)
        on_document(number + 1)
    names = [x for x in ("picks", "logits", "weights", "logprobs") if x in captures[0]]
    arrays = {name: np.concatenate([capture[name] for capture in captures]) for name in names}
    timings = {"load": loaded - started, "run": time.perf_counter() - loaded}
    return arrays, run_facts(llm, watched, captures[0]["layers"]) | {"timings": timings}


def run_document(llm: Any, ids: Any) -> None:
    """Run one document as a prompt, and generate one token."""
    vllm = importlib.import_module("vllm")
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    llm.generate([{"prompt_token_ids": ids.tolist()}], sampling, use_tqdm=False)


def timing_runs(request: dict[str, Any], documents: list[Any]) -> dict[str, Callable[[], None]]:
    """Return functions that run all documents without and with recording, to be timed."""
    llm = load_engine(request, max(map(len, documents)))
    recorder, watched = VllmRecorder(), layer_routers(loaded_module(llm))
    plain = [router._compute_routing for _, router in watched]
    for layer, router in watched:
        recorder.watch_router(layer, router)
    recorded = [router._compute_routing for _, router in watched]

    def make_run(methods: list[Any]) -> Callable[[], None]:
        def run_all_documents() -> None:
            for index, (_, router) in enumerate(watched):
                router._compute_routing = methods[index]
            for ids in documents:
                run_document(llm, ids)
                if methods is recorded:
                    recorder.take_document(len(ids))

        return run_all_documents

    return {"plain": make_run(plain), "captured": make_run(recorded)}


def final_logprobs(model: Any, states: list[Any], count: int) -> Any:
    """Return log-probabilities (T, V) of the last document, and clear its hidden states."""
    torch = importlib.import_module("torch")
    hidden = states[0][0] if isinstance(states[0], tuple) else states[0]
    states.clear()
    with torch.inference_mode():
        logits = model.compute_logits(hidden[:count])
        return logits.double().log_softmax(1).float().numpy()


def run_facts(llm: Any, watched: list[tuple[int, Any]], layers: list[int]) -> dict[str, Any]:
    """Return layer names, units, format, versions and settings of a run."""
    vllm, torch = importlib.import_module("vllm"), importlib.import_module("torch")
    config = llm.llm_engine.model_config
    back = {long: short for short, long in FORMATS.items()}
    dtype = str(config.dtype).rpartition(".")[2]
    return {
        "layers": [f"model.layers.{layer}.mlp.gate" for layer in layers],
        "units": "logits",
        "dtype": back.get(dtype, dtype),
        "architecture": str((config.hf_config.architectures or [""])[0]),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "settings": {
            "router": type(watched[0][1]).__name__,
            "quantisation": config.quantization or "none",
            "prefix caching": "off",
            "eager": "on",
        },
    }
