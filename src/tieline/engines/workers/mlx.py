"""Worker for mlx-lm: gates and expert blocks tell what they compute, the model stays as it is.

Each gate and each block of experts becomes, for the run, an instance of a subclass of its own
class, which records the gate's logits and the indices that the experts are called with. A gate
that returns a choice instead of logits (as those with a bias do) gives ids only.
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
"""Names of Mixtral's matrices in mlx-lm."""
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
BLOCKS = ("SwitchGLU", "SwitchMLP")


def error(message: str) -> Exception:
    """Return an error that is reported without its type."""
    return type("EngineError", (Exception,), {})(message)


def spied(
    module: Any,
    before: Callable[..., None] | None = None,
    after: Callable[[Any], None] | None = None,
) -> None:
    """Make a module an instance of a subclass that shows its arguments and its result."""
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
    """Records of the routers of a model, by layer.

    Args:
        modules: (name, module) of every module.
    """

    def __init__(self, modules: list[tuple[str, Any]]) -> None:
        self.logits: dict[int, Any] = {}
        self.picks: dict[int, Any] = {}
        modules_by_name = dict(modules)
        for name, module in modules:
            if type(module).__name__ in BLOCKS:
                self._watch(name, module, modules_by_name)

    def _watch(self, name: str, block: Any, modules_by_name: dict[str, Any]) -> None:
        layer = layer_number(name)
        parent = name.rpartition(".")[0]
        gates = [modules_by_name.get(f"{parent}.{gate}") for gate in ("gate", "router")]
        spied(block, before=lambda x, indices, *_, **__: self._picks(layer, indices))
        for gate in gates:
            if gate is not None:
                spied(gate, after=lambda logits: self._logits(layer, logits))

    def _picks(self, layer: int, indices: Any) -> None:
        self.picks[layer] = indices

    def _logits(self, layer: int, output: Any) -> None:
        if hasattr(output, "shape"):
            self.logits[layer] = output

    def take(self, count: int, array: Callable[[Any], Any]) -> dict[str, Any]:
        """Arrays (T, L, ...) of one document of T tokens."""
        import numpy as np

        picks, logits = self.picks, self.logits
        self.picks, self.logits = {}, {}
        layers = sorted(picks)
        if not layers:
            raise error("this model has no block of experts that mlx-lm routes to")
        arrays: dict[str, Any] = {"layers": layers}
        arrays["picks"] = np.stack([in_rows(array(picks[x]), count) for x in layers], 1)
        if all(layer in logits for layer in layers):
            arrays["logits"] = np.stack([in_rows(array(logits[x]), count) for x in layers], 1)
        return arrays


def in_rows(array: Any, count: int) -> Any:
    """A row per token, without the batch axis."""
    if array.size == 0 or array.size % count:
        raise error(f"mlx-lm routed {array.shape} numbers for {count} tokens")
    return array.reshape(count, -1)


def layer_number(name: str) -> int:
    """The number of the layer in the name of a module."""
    numbers = [segment for segment in name.split(".") if segment.isdigit()]
    if not numbers:
        raise error(f"no layer number in {name}")
    return int(numbers[0])


def opened(request: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """mlx, the model on the CPU, and its configuration."""
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
        raise error(f"mlx-lm does not take {folder}: {problem}") from problem
    return core, model, config


def achieved(core: Any, model: Any) -> dict[str, float]:
    """Bits per weight, and the share of the weights that are quantised."""
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
    """Refuse a model that says it is quantised and is not."""
    stated = config.get("quantization") or config.get("quantization_config")
    if stated and sizes["share"] < 0.5:
        raise error(
            f"this model says it is quantised to {stated.get('bits', '?')} bits and has "
            f"{sizes['bits']:.2f} bits per weight: {sizes['share']:.0%} of its weights are "
            "quantised (is its width a multiple of the group size?)"
        )


def dtype_of(config: dict[str, Any], model: Any, share: float) -> str:
    """The number format whose noise the weights and the arithmetic make."""
    stated = config.get("quantization") or config.get("quantization_config") or {}
    if share and int(stated.get("bits", 0)) in (4, 8):
        return f"int{stated['bits']}_group"
    kinds = {str(x.dtype).rpartition(".")[2] for x in _arrays(model)} - {"uint32"}
    back = {long: short for short, long in FORMATS.items()}
    return back.get(next(iter(kinds)), "fp32") if len(kinds) == 1 else "fp32"


def _arrays(model: Any) -> list[Any]:
    tree = importlib.import_module("mlx.utils")
    return [value for _, value in tree.tree_flatten(model.parameters())]


def run(request: dict[str, Any], documents: list[Any], tell: Callable[[int], None]) -> Any:
    """Arrays and facts of the documents, or the weights of the model."""
    import numpy as np

    started = time.perf_counter()
    core, model, config = opened(request)
    sizes = achieved(core, model)
    check_quantised(config, sizes)
    dtype = dtype_of(config, model, sizes["share"])
    if request["job"] == "weights":
        unquantised = stored_formats(model, request["names"])
        facts = {**sizes, "dtype": dtype, "unquantised": unquantised}
        return weights(core, model, request["names"]), facts
    prepared(core, model, request)
    recorder = MlxRecorder(list(model.named_modules()))
    loaded, captures = time.perf_counter(), []
    for number, ids in enumerate(documents):
        logits = forward(core, model, ids.astype(np.int32))
        capture = recorder.take(len(ids), lambda value: array(core, value))
        if request["logprobs"]:
            capture["logprobs"] = log_softmax(array(core, logits)[0])
        captures.append(capture)
        tell(number + 1)
    names = [x for x in ("picks", "logits", "logprobs") if x in captures[0]]
    arrays = {name: np.concatenate([capture[name] for capture in captures]) for name in names}
    return arrays, {
        "layers": [f"model.layers.{layer}.mlp.gate" for layer in captures[0]["layers"]],
        "units": "logits",
        "dtype": dtype_of(config, model, sizes["share"]),
        "bits": sizes["bits"],
        "architecture": str(config.get("model_type", "")),
        "versions": versions(),
        "settings": {"device": "cpu", "weights quantised": sizes["share"]},
        "timings": {"load": loaded - started, "run": time.perf_counter() - loaded},
    }


def prepared(core: Any, model: Any, request: dict[str, Any]) -> None:
    """Bring the weights into the precision that was asked for, and into memory."""
    if not request["defaults"]:
        model.set_dtype(getattr(core, FORMATS[request["dtype"]]))
    core.eval(model.parameters())


def array(core: Any, value: Any) -> Any:
    """An array of NumPy, which has no bfloat16."""
    import numpy as np

    wide = core.float32 if "float" in str(value.dtype) else core.int32
    return np.array(value.astype(wide))


def timing_runs(request: dict[str, Any], documents: list[Any]) -> dict[str, Callable[[], None]]:
    """Runs over all documents without and with capture, each with a model of its own."""

    def timing_run(watched: bool) -> Callable[[], None]:
        core, model, _ = opened(request)
        prepared(core, model, request)
        recorder = MlxRecorder(list(model.named_modules())) if watched else None

        def go() -> None:
            for ids in documents:
                forward(core, model, ids.astype("int32"))
                if recorder is not None:
                    recorder.take(len(ids), lambda value: array(core, value))

        return go

    return {"plain": timing_run(False), "captured": timing_run(True)}


def forward(core: Any, model: Any, ids: Any) -> Any:
    """Logits (1, T, V) of one document."""
    try:
        logits = model(core.array(ids)[None])
        core.eval(logits)
    except RuntimeError as problem:
        if "only supports float32" not in str(problem):
            raise
        message = "mlx routes on a CPU in float32 only: leave --engine-defaults and --dtype away"
        raise error(f"{message} ({problem})") from problem
    return logits


def versions() -> dict[str, str]:
    """Versions of mlx and mlx-lm."""
    metadata = importlib.import_module("importlib.metadata")
    return {name: metadata.version(name) for name in ("mlx", "mlx-lm")}


def log_softmax(logits: Any) -> Any:
    """Log-probabilities in float32 of logits (T, V)."""
    import numpy as np

    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(1, keepdims=True))).astype(np.float32)


def module_of(name: str) -> tuple[str, str, int | None]:
    """Module and parameter of mlx-lm, and the expert's number, for a name in a checkpoint."""
    match = EXPERT.fullmatch(name)
    if match is None:
        module, _, parameter = name.rpartition(".")
        return module, parameter, None
    projection = PROJECTIONS.get(match[3], match[3])
    return f"{match[1]}.switch_mlp.{projection}", "weight", int(match[2])


def weights(core: Any, model: Any, names: list[str]) -> dict[str, Any]:
    """The tensors that a checkpoint calls by these names, dequantised to float32."""
    import numpy as np

    modules, cache, arrays = dict(model.named_modules()), {}, {}
    for name in names:
        module_name, parameter, expert = module_of(name)
        if module_name not in modules or parameter not in modules[module_name]:
            raise error(f"mlx-lm's model has no {name}: it is of another model")
        if (module_name, parameter) not in cache:
            cache = {(module_name, parameter): _dequantised(core, modules[module_name], parameter)}
        value = cache[module_name, parameter]
        arrays[name] = np.ascontiguousarray(value if expert is None else value[expert])
    return arrays


def stored_formats(model: Any, names: list[str]) -> dict[str, str]:
    """Formats of the tensors that are not quantised, as GGUF calls them."""
    modules, formats = dict(model.named_modules()), {}
    for name in names:
        module_name, parameter, _ = module_of(name)
        module = modules.get(module_name, {})
        if parameter in module and not (parameter == "weight" and "scales" in module):
            kind = str(module[parameter].dtype).rpartition(".")[2]
            formats[name] = kind.replace("bfloat", "BF").replace("float", "F")
    return formats


def wide(core: Any, value: Any) -> Any:
    """Scales or biases in float32; packed ones of other modes as they are."""
    if value is None or "float" not in str(value.dtype):
        return value
    return value.astype(core.float32)


def _dequantised(core: Any, module: Any, parameter: str) -> Any:
    """One parameter in float32, dequantised if it is quantised."""
    import numpy as np

    value = module[parameter]
    if parameter == "weight" and "scales" in module:
        mode = {"mode": module.mode} if hasattr(module, "mode") else {}
        # in float32, as the run has them: in bfloat16 the result would be rounded once more
        scales, biases = (wide(core, module.get(name)) for name in ("scales", "biases"))
        value = core.dequantize(value, scales, biases, module.group_size, module.bits, **mode)
    return np.array(value.astype(core.float32))
