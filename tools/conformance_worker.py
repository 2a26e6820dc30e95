"""Routers of inference engines behind a pipe: runs in the engine's own Python, needs NumPy alone.

    PYTHON tools/conformance_worker.py NAME

Reads requests and writes answers, each the length in eight bytes and an .npz: logits (T, E), k and,
where the rule has them, bias (E,), groups and k_groups; back come ids and weights (T, k), or the
text of an error.
"""

# Engines stand in environments of their own.
# pyright: reportMissingImports=false

import ctypes
import io
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

Answer = tuple[np.ndarray, np.ndarray]


def vllm_softmax(renormalize: bool) -> Callable[..., Answer]:
    """VLLM's CPU router: top-k of logits, softmax of the chosen or of all."""
    import torch
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

    def route(logits: np.ndarray, k: int) -> Answer:
        z = torch.from_numpy(logits)
        weights, ids = select_experts(z, z, k, False, renormalize)
        return ids.numpy(), weights.numpy()

    return route


def vllm_grouped(scoring: str, renormalize: bool, scale: float) -> Callable[..., Answer]:
    """VLLM's CPU router with groups, and with a bias where one is given."""
    import torch
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

    def route(logits: np.ndarray, k: int, groups: int, k_groups: int, bias: Any = None) -> Answer:
        z = torch.from_numpy(logits)
        weights, ids = select_experts(
            z,
            z,
            k,
            True,
            renormalize,
            topk_group=k_groups,
            num_expert_group=groups,
            scoring_func=scoring,
            routed_scaling_factor=scale,
            e_score_correction_bias=None if bias is None else torch.from_numpy(bias),
        )
        return ids.numpy(), weights.numpy()

    return route


def vllm_biased_kernel() -> Callable[..., Answer]:
    """The AVX-512 kernel that vLLM took over from SGLang: sigmoid with a bias, renormalised."""
    import torch
    from vllm._custom_ops import biased_topk_cpu

    def route(logits: np.ndarray, k: int, bias: np.ndarray) -> Answer:
        z = torch.from_numpy(logits)
        weights, ids = biased_topk_cpu(
            z, z, torch.from_numpy(bias), k, True, "sigmoid", 0, 1.0, False
        )
        return ids.numpy(), weights.numpy()

    return route


def mlx_block(module: str, block: str, **fields: Any) -> Callable[..., Answer]:
    """A block of mlx-lm whose gate is the identity and whose experts return the unit vectors.

    The output of the block is then its combine weights, one per slot.
    """
    import importlib

    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    blocks = importlib.import_module(f"mlx_lm.models.{module}")

    def route(logits: np.ndarray, k: int) -> Answer:
        chosen = []

        def experts(x: Any, indices: Any) -> Any:
            chosen.append(indices)
            units = mx.eye(k, logits.shape[1])
            return mx.broadcast_to(units, (*indices.shape, logits.shape[1]))

        sizes = SimpleNamespace(
            hidden_size=8,
            intermediate_size=8,
            moe_intermediate_size=8,
            num_experts=logits.shape[1],
            num_local_experts=logits.shape[1],
            num_experts_per_tok=k,
            **fields,
        )
        layer = getattr(blocks, block)(sizes)
        layer.gate, layer.switch_mlp = (lambda x: x), experts
        weights = layer(mx.array(logits)[None])[0]
        return np.array(chosen[0]).reshape(len(logits), k), np.array(weights)[:, :k]

    return route


def mlx_grouped() -> Callable[..., Answer]:
    """`group_expert_select` of mlx-lm's DeepSeek-V3."""
    import mlx.core as mx
    from mlx_lm.models.deepseek_v3 import group_expert_select

    mx.set_default_device(mx.cpu)

    def route(logits: np.ndarray, k: int, bias: np.ndarray, groups: int, k_groups: int) -> Answer:
        z, b = mx.array(logits), mx.array(bias)
        ids, weights = group_expert_select(z, b, k, groups, k_groups, 2.5, True)
        return np.array(ids), np.array(weights)

    return route


def llamacpp_graph(gating: str, renormalize: bool, biased: bool) -> Callable[..., Answer]:
    """The routing part of llama.cpp's `build_moe_ffn`, built from ggml's operators.

    probabilities → (+ bias) → argsort_top_k → get_rows → sum_rows, clamp at 2^-14, div
    """
    base, cpu = _ggml()
    least_sum = 6.103515625e-5

    def route(logits: np.ndarray, k: int, bias: np.ndarray | None = None) -> Answer:
        tokens, experts = logits.shape
        memory = 64 * logits.nbytes + (64 << 20)
        context = base.ggml_init(_InitParameters(memory, None, False))
        try:
            z = _filled(base, context, logits)
            shares = (base.ggml_soft_max if gating == "softmax" else base.ggml_sigmoid)(context, z)
            ranked = shares
            if biased and bias is not None:
                ranked = base.ggml_add(context, shares, _filled(base, context, bias[None]))
            ids = base.ggml_cont(context, base.ggml_argsort_top_k(context, ranked, k))
            columns = base.ggml_reshape_3d(context, shares, 1, experts, tokens)
            weights = base.ggml_get_rows(context, columns, ids)
            weights = base.ggml_reshape_2d(context, weights, k, tokens)
            if renormalize:
                total = base.ggml_sum_rows(context, weights)
                total = base.ggml_clamp(context, total, least_sum, float("inf"))
                weights = base.ggml_div(context, weights, total)
            graph = base.ggml_new_graph(context)
            base.ggml_build_forward_expand(graph, ids)
            base.ggml_build_forward_expand(graph, weights)
            code = cpu.ggml_graph_compute_with_ctx(context, graph, 1)
            if code:
                raise RuntimeError(f"ggml_graph_compute_with_ctx returned {code}")
            shape = (tokens, k)
            return _copied(base, ids, shape, np.int32), _copied(base, weights, shape, np.float32)
        finally:
            base.ggml_free(context)

    def route_rows(logits: np.ndarray, k: int, bias: np.ndarray | None = None) -> Answer:
        if not len(logits):
            return np.empty((0, k), np.int32), np.empty((0, k), np.float32)
        blocks = [route(logits[i : i + 4096], k, bias) for i in range(0, len(logits), 4096)]
        return np.concatenate([b[0] for b in blocks]), np.concatenate([b[1] for b in blocks])

    return route_rows


class _InitParameters(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def _ggml() -> tuple[Any, Any]:
    """Ggml's library of operators and the one of its CPU backend."""
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or _bundled_libraries())
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    names = ("libggml-cpu.so", "libggml-cpu-haswell.so", "libggml-cpu-x64.so")
    name = next(name for name in names if (folder / name).is_file())
    cpu = ctypes.CDLL(str(folder / name))
    base.ggml_init.argtypes = [_InitParameters]
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    for function, types in {
        "new_tensor_2d": (pointer, ctypes.c_int, long, long),
        "soft_max": (pointer, pointer),
        "sigmoid": (pointer, pointer),
        "add": (pointer, pointer, pointer),
        "cont": (pointer, pointer),
        "argsort_top_k": (pointer, pointer, ctypes.c_int),
        "reshape_2d": (pointer, pointer, long, long),
        "reshape_3d": (pointer, pointer, long, long, long),
        "get_rows": (pointer, pointer, pointer),
        "sum_rows": (pointer, pointer),
        "clamp": (pointer, pointer, ctypes.c_float, ctypes.c_float),
        "div": (pointer, pointer, pointer),
        "new_graph": (pointer,),
        "build_forward_expand": (pointer, pointer),
        "get_data": (pointer,),
        "free": (pointer,),
    }.items():
        operator = getattr(base, f"ggml_{function}")
        operator.argtypes, operator.restype = list(types), pointer
    base.ggml_init.restype = pointer
    cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, ctypes.c_int]
    cpu.ggml_cpu_init()
    return base, cpu


def _bundled_libraries() -> Path:
    """The folder of the libraries that llama-cpp-python was built with."""
    import llama_cpp

    return Path(str(llama_cpp.__file__)).parent / "lib"


def _filled(base: Any, context: Any, values: np.ndarray) -> Any:
    """A float32 tensor of ggml with these values; its fastest axis is the last one here."""
    rows, columns = values.shape
    tensor = base.ggml_new_tensor_2d(context, 0, columns, rows)
    source = np.ascontiguousarray(values, np.float32)
    ctypes.memmove(base.ggml_get_data(tensor), source.ctypes.data, source.nbytes)
    return tensor


def _copied(base: Any, tensor: Any, shape: tuple[int, int], kind: Any) -> np.ndarray:
    """The values of a contiguous tensor."""
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    data = ctypes.string_at(base.ggml_get_data(tensor), size)
    return np.frombuffer(data, kind).reshape(shape)


OLMOE = {"norm_topk_prob": False, "mlp_bias": False}
ROUTERS: dict[str, Callable[[], Callable[..., Answer]]] = {
    "vllm-softmax": lambda: vllm_softmax(True),
    "vllm-softmax-raw": lambda: vllm_softmax(False),
    "vllm-grouped-softmax": lambda: vllm_grouped("softmax", False, 16.0),
    "vllm-grouped-sigmoid": lambda: vllm_grouped("sigmoid", True, 2.5),
    "vllm-biased-kernel": vllm_biased_kernel,
    "mlx-qwen3_moe": lambda: mlx_block("qwen3_moe", "Qwen3MoeSparseMoeBlock", norm_topk_prob=True),
    "mlx-olmoe": lambda: mlx_block("olmoe", "OlmoeSparseMoeBlock", **OLMOE),
    "mlx-mixtral": lambda: mlx_block("mixtral", "MixtralSparseMoeBlock"),
    "mlx-deepseek_v3": mlx_grouped,
    "llama.cpp-softmax": lambda: llamacpp_graph("softmax", True, False),
    "llama.cpp-softmax-raw": lambda: llamacpp_graph("softmax", False, False),
    "llama.cpp-sigmoid-biased": lambda: llamacpp_graph("sigmoid", True, True),
}
"""Routers by name; the part before the first hyphen is the engine."""


def serve(route: Callable[..., Answer], source: Any, target: Any) -> None:
    """Answer requests until the pipe is closed."""
    while header := source.read(8):
        request = np.load(io.BytesIO(source.read(struct.unpack("<q", header)[0])))
        fields = {key: request[key] for key in request.files}
        for key in {"k", "groups", "k_groups"} & set(fields):
            fields[key] = int(fields[key])
        try:
            ids, weights = route(**fields)
            answer: dict[str, Any] = {
                "ids": ids.astype(np.int64),
                "weights": weights.astype(np.float32),
            }
        except Exception as problem:
            answer = {"error": np.array(f"{type(problem).__name__}: {problem}"[:300])}
        buffer = io.BytesIO()
        np.savez(buffer, **answer)
        target.write(struct.pack("<q", len(buffer.getvalue())) + buffer.getvalue())
        target.flush()


def main() -> None:
    """Serve the router that the command line names; what engines print goes to standard error."""
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(ROUTERS[sys.argv[1]](), sys.stdin.buffer, target)


if __name__ == "__main__":
    main()
