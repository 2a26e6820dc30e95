"""Worker for mlx-lm: records the logits of gates and the choices that expert blocks get.

For the run, each gate and each block of experts becomes an instance of a subclass of its own class,
which records the gate's logits and the indices that the experts are called with. For a gate that
returns a choice instead of logits (as those with a bias do) only ids are recorded.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Names in mlx-lm of the expert matrices of Mixtral's checkpoints."""
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
BLOCKS = ("SwitchGLU", "SwitchMLP")


def engine_error(message: str) -> Exception:
    """Return an error whose message is reported without its type."""
    return type("EngineError", (Exception,), {})(message)


def hook_calls(
    module: Any,
    before: Callable[..., None] | None = None,
    after: Callable[[Any], None] | None = None,
) -> None:
    """Call `before` with a module's arguments and `after` with its result, at each call of it."""
    base = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = base.__call__(self, *args, **kwargs)
        if after is not None:
            after(result)
        return result

    module.__class__ = type(base.__name__, (base,), {"__call__": call})


class MlxRecorder:
    """Records logits and picks of a model's routers, by layer.

    Args:
        modules: (name, module) of every module.
    """

    def __init__(self, modules: list[tuple[str, Any]]) -> None:
        self.logits: dict[int, Any] = {}
        self.picks: dict[int, Any] = {}
        modules_by_name = dict(modules)
        for name, module in modules:
            if type(module).__name__ in BLOCKS:
                self._watch_block(name, module, modules_by_name)

    def _watch_block(self, name: str, block: Any, modules_by_name: dict[str, Any]) -> None:
        layer = layer_of_module(name)
        parent = name.rpartition(".")[0]
        gates = [modules_by_name.get(f"{parent}.{gate}") for gate in ("gate", "router")]
        hook_calls(block, before=lambda x, indices, *_, **__: self._record_picks(layer, indices))
        for gate in gates:
            if gate is not None:
                hook_calls(gate, after=lambda logits: self._record_logits(layer, logits))

    def _record_picks(self, layer: int, indices: Any) -> None:
        self.picks[layer] = indices

    def _record_logits(self, layer: int, output: Any) -> None:
        if hasattr(output, "shape"):
            self.logits[layer] = output

    def take_document(self, count: int, to_numpy: Callable[[Any], Any]) -> dict[str, Any]:
        """Return and clear the arrays (T, L, ...) of one document of T tokens."""
        import numpy as np

        picks, logits = self.picks, self.logits
        self.picks, self.logits = {}, {}
        layers = sorted(picks)
        if not layers:
            raise engine_error("this model has no block of experts that mlx-lm routes to")
        arrays: dict[str, Any] = {"layers": layers}
        arrays["picks"] = np.stack([rows_per_token(to_numpy(picks[x]), count) for x in layers], 1)
        if all(layer in logits for layer in layers):
            arrays["logits"] = np.stack(
                [rows_per_token(to_numpy(logits[x]), count) for x in layers], 1
            )
        return arrays


def rows_per_token(array: Any, count: int) -> Any:
    """Reshape an array to a row per token, without the batch axis."""
    if array.size == 0 or array.size % count:
        raise engine_error(f"mlx-lm routed {array.shape} numbers for {count} tokens")
    return array.reshape(count, -1)


def layer_of_module(name: str) -> int:
    """Return the layer number in the name of a module."""
    numbers = [segment for segment in name.split(".") if segment.isdigit()]
    if not numbers:
        raise engine_error(f"no layer number in {name}")
    return int(numbers[0])


def open_model(request: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the module mlx.core, the model on the CPU, and its configuration."""
    core = importlib.import_module("mlx.core")
    core.set_default_device(core.cpu)
    utils = importlib.import_module("mlx_lm.utils")
    folder = Path(request["model"])
    if not folder.is_dir():
        resolve = (
            utils.hf_repo_to_path if hasattr(utils, "hf_repo_to_path") else utils.get_model_path
        )
        folder = Path(resolve(request["model"]))
    try:
        model, config = utils.load_model(folder)
    except ValueError as problem:
        raise engine_error(f"mlx-lm does not take {folder}: {problem}") from problem
    return core, model, config


def weight_sizes(core: Any, model: Any) -> dict[str, float]:
    """Return the bits per weight, and the share of the weights that are quantised."""
    bits = weights = quantised = 0
    for _, module in model.named_modules():
        arrays = {key: value for key, value in module.items() if isinstance(value, core.array)}
        for key, value in arrays.items():
            count = value.size
            bits += 8 * value.nbytes
            if key == "weight" and "scales" in arrays:
                count = value.size * 32 // int(module.bits)
                quantised += count
            if key not in ("scales", "biases") or "scales" not in arrays:
                weights += count
    return {"bits": bits / weights, "share": quantised / weights}


def check_quantised(config: dict[str, Any], sizes: dict[str, float]) -> None:
    """Raise if a model is quantised by its configuration but most of its weights are not."""
    stated = config.get("quantization") or config.get("quantization_config")
    if stated and sizes["share"] < 0.5:
        raise engine_error(
            f"this model says it is quantised to {stated.get('bits', '?')} bits and has "
            f"{sizes['bits']:.2f} bits per weight: {sizes['share']:.0%} of its weights are "
            "quantised (is its width a multiple of the group size?)"
        )


def noise_format(config: dict[str, Any], model: Any, share: float) -> str:
    """Return the number format with the noise of the model's weights and arithmetic."""
    stated = config.get("quantization") or config.get("quantization_config") or {}
    if share and int(stated.get("bits", 0)) in (4, 8):
        return f"int{stated['bits']}_group"
    kinds = {str(x.dtype).rpartition(".")[2] for x in _parameter_arrays(model)} - {"uint32"}
    back = {long: short for short, long in FORMATS.items()}
    return back.get(next(iter(kinds)), "fp32") if len(kinds) == 1 else "fp32"


def _parameter_arrays(model: Any) -> list[Any]:
    """Return all parameters of a model."""
    tree = importlib.import_module("mlx.utils")
    return [value for _, value in tree.tree_flatten(model.parameters())]


def run(request: dict[str, Any], documents: list[Any], on_document: Callable[[int], None]) -> Any:
    """Run the documents, or read the model's weights, and return arrays and facts."""
    import numpy as np

    started = time.perf_counter()
    core, model, config = open_model(request)
    sizes = weight_sizes(core, model)
    check_quantised(config, sizes)
    dtype = noise_format(config, model, sizes["share"])
    if request["job"] == "weights":
        unquantised = unquantised_formats(model, request["names"])
        facts = {**sizes, "dtype": dtype, "unquantised": unquantised}
        return dequantised_weights(core, model, request["names"]), facts
    prepare_weights(core, model, request)
    recorder = MlxRecorder(list(model.named_modules()))
    loaded, captures = time.perf_counter(), []
    for number, ids in enumerate(documents):
        logits = document_logits(core, model, ids.astype(np.int32))
        capture = recorder.take_document(len(ids), lambda value: numpy_array(core, value))
        if request["logprobs"]:
            capture["logprobs"] = log_softmax(numpy_array(core, logits)[0])
        captures.append(capture)
        on_document(number + 1)
    names = [x for x in ("picks", "logits", "logprobs") if x in captures[0]]
    arrays = {name: np.concatenate([capture[name] for capture in captures]) for name in names}
    return arrays, {
        "layers": [f"model.layers.{layer}.mlp.gate" for layer in captures[0]["layers"]],
        "units": "logits",
        "dtype": noise_format(config, model, sizes["share"]),
        "bits": sizes["bits"],
        "architecture": str(config.get("model_type", "")),
        "versions": package_versions(),
        "settings": {"device": "cpu", "weights quantised": sizes["share"]},
        "timings": {"load": loaded - started, "run": time.perf_counter() - loaded},
    }


def prepare_weights(core: Any, model: Any, request: dict[str, Any]) -> None:
    """Convert the weights to the requested precision and load them into memory."""
    if not request["defaults"]:
        model.set_dtype(getattr(core, FORMATS[request["dtype"]]))
    core.eval(model.parameters())


def numpy_array(core: Any, value: Any) -> Any:
    """Convert an mlx array to NumPy, in float32 or int32; NumPy has no bfloat16."""
    import numpy as np

    dtype = core.float32 if "float" in str(value.dtype) else core.int32
    return np.array(value.astype(dtype))


def timing_runs(request: dict[str, Any], documents: list[Any]) -> dict[str, Callable[[], None]]:
    """Return functions that run all documents without and with recording, to be timed."""

    def make_run(watched: bool) -> Callable[[], None]:
        core, model, _ = open_model(request)
        prepare_weights(core, model, request)
        recorder = MlxRecorder(list(model.named_modules())) if watched else None

        def run_all_documents() -> None:
            for ids in documents:
                document_logits(core, model, ids.astype("int32"))
                if recorder is not None:
                    recorder.take_document(len(ids), lambda value: numpy_array(core, value))

        return run_all_documents

    return {"plain": make_run(False), "captured": make_run(True)}


def document_logits(core: Any, model: Any, ids: Any) -> Any:
    """Return the logits (1, T, V) of one document."""
    try:
        logits = model(core.array(ids)[None])
        core.eval(logits)
    except RuntimeError as problem:
        if "only supports float32" not in str(problem):
            raise
        message = "mlx routes on a CPU in float32 only: leave --engine-defaults and --dtype away"
        raise engine_error(f"{message} ({problem})") from problem
    return logits


def package_versions() -> dict[str, str]:
    """Return the versions of mlx and mlx-lm."""
    metadata = importlib.import_module("importlib.metadata")
    return {name: metadata.version(name) for name in ("mlx", "mlx-lm")}


def log_softmax(logits: Any) -> Any:
    """Return the log-probabilities of logits (T, V), in float32."""
    import numpy as np

    float64_logits = logits.astype(np.float64)
    float64_logits -= float64_logits.max(1, keepdims=True)
    return (float64_logits - np.log(np.exp(float64_logits).sum(1, keepdims=True))).astype(
        np.float32
    )


def module_parameter(name: str) -> tuple[str, str, int | None]:
    """Return module and parameter in mlx-lm, and the expert, of a tensor name of a checkpoint."""
    match = EXPERT.fullmatch(name)
    if match is None:
        module, _, parameter = name.rpartition(".")
        return module, parameter, None
    projection = PROJECTIONS.get(match[3], match[3])
    return f"{match[1]}.switch_mlp.{projection}", "weight", int(match[2])


def dequantised_weights(core: Any, model: Any, names: list[str]) -> dict[str, Any]:
    """Return the tensors with these names of a checkpoint, dequantised to float32."""
    import numpy as np

    modules, cache, arrays = dict(model.named_modules()), {}, {}
    for name in names:
        module_name, parameter, expert = module_parameter(name)
        if module_name not in modules or parameter not in modules[module_name]:
            raise engine_error(f"mlx-lm's model has no {name}: it is of another model")
        if (module_name, parameter) not in cache:
            cache = {
                (module_name, parameter): _dequantised_parameter(
                    core, modules[module_name], parameter
                )
            }
        value = cache[module_name, parameter]
        arrays[name] = np.ascontiguousarray(value if expert is None else value[expert])
    return arrays


def unquantised_formats(model: Any, names: list[str]) -> dict[str, str]:
    """Return the number formats of the tensors that are not quantised, in GGUF's names."""
    modules, formats = dict(model.named_modules()), {}
    for name in names:
        module_name, parameter, _ = module_parameter(name)
        module = modules.get(module_name, {})
        if parameter in module and not (parameter == "weight" and "scales" in module):
            kind = str(module[parameter].dtype).rpartition(".")[2]
            formats[name] = kind.replace("bfloat", "BF").replace("float", "F")
    return formats


def in_float32(core: Any, value: Any) -> Any:
    """Return scales or biases in float32; integers, packed ones and None are unchanged."""
    if value is None or "float" not in str(value.dtype):
        return value
    return value.astype(core.float32)


def _dequantised_parameter(core: Any, module: Any, parameter: str) -> Any:
    """Return one parameter in float32, dequantised if it is quantised."""
    import numpy as np

    value = module[parameter]
    if parameter == "weight" and "scales" in module:
        mode = {"mode": module.mode} if hasattr(module, "mode") else {}
        # in float32, as the run has them: in bfloat16 the result would be rounded once more
        scales, biases = (in_float32(core, module.get(name)) for name in ("scales", "biases"))
        value = core.dequantize(value, scales, biases, module.group_size, module.bits, **mode)
    return np.array(value.astype(core.float32))
