"""Load Mixtures of Experts to inspect, dense models to upcycle, and shapes of routed layers.

    load_model       a Mixture of Experts with its tokenizer, from a folder or the hub
    load_smoothed    a model that was saved smoothed, without a tokenizer
    load_dense       a dense model: folder, hub id, or a .bin file of llama2.c
    read_shape       the shape of a model's routed layers, from its configuration alone
    use_experts      choose transformers' implementation of the experts

Only safetensors are read. Whether a model is a Mixture of Experts of a known family is checked on a
skeleton without weights before any weight is read or downloaded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

from tieline.core.errors import ParameterError, TielineError, UnsupportedModelError, require
from tieline.hf.changes import changes_of, first_line, load_pretrained, read_checkpoint
from tieline.hf.families import chosen_routers, family_of, find_routers
from tieline.hf.llama2c import load_llama2c, load_llama2c_tokenizer
from tieline.hf.shipped import SHIPPED_FOLDER, load_shipped_model, load_shipped_tokenizer
from tieline.hf.smooth import FEATURE as SMOOTH

DTYPES: dict[str, str | torch.dtype] = {
    "auto": "auto",
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
"""Precisions by name; "auto" is that of the checkpoint."""

_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)


class LoadedModel(NamedTuple):
    """A model in evaluation mode, its tokenizer, and the name it was loaded by."""

    model: nn.Module
    tokenizer: Any
    name: str


def load_model(
    name: str | Path | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a Mixture-of-Experts model and its tokenizer, with all changes that it was saved with.

    Args:
        name: folder with a checkpoint, or id on the hub; None for the model in the box.
        revision: branch, tag or commit on the hub.
        dtype: a name in `DTYPES`.
        device: "cpu", "cuda", "cuda:1", ...; "auto" spreads the model over all devices.
        trust_remote_code: whether code that comes with the model may run.
    """
    require(dtype in DTYPES, f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
    where = _device(device)
    if name is None:
        return _shipped(DTYPES[dtype], where)
    source = _source(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options |= {"local_files_only": True} if isinstance(source, Path) else {"revision": revision}
    with _explained(name, "configuration"):
        checkpoint = read_checkpoint(source, **options)
    # a changed model is not what its configuration alone describes, so it has no skeleton to check
    known = None if checkpoint.changes else _model_class(checkpoint.config, name, trust_remote_code)
    with _explained(name, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, config=checkpoint.config, **options)
    placed: dict[str, Any] = {"device_map": "auto"} if where is None else {}
    with _explained(name, "weights (safetensors only: pickled weights are never loaded)"):
        model: Any = load_pretrained(
            source,
            model_class=known,
            checkpoint=checkpoint,
            dtype=DTYPES[dtype],
            **placed,
            **options,
        )
    model = model if where is None else model.to(where)
    return LoadedModel(model.eval(), tokenizer, str(name))


def _shipped(dtype: str | torch.dtype, device: torch.device | None) -> LoadedModel:
    if not (SHIPPED_FOLDER / "config.json").is_file():
        raise TielineError(f"the model that ships with the package is missing: {SHIPPED_FOLDER}")
    model: Any = load_shipped_model()
    if isinstance(dtype, torch.dtype):
        model = model.to(dtype)
    return LoadedModel(model.to(device or "cpu"), load_shipped_tokenizer(), "shipped")


def _source(name: str | Path) -> str | Path:
    """The folder, if there is one; else the hub id, if it can be one."""
    folder = Path(name)
    if folder.is_dir():
        require((folder / "config.json").is_file(), f"no config.json in the folder {str(name)!r}")
        return folder
    parts = str(name).split("/")
    is_id = isinstance(name, str) and len(parts) <= 2 and all(parts) and parts[0] not in (".", "..")
    require(is_id, f"no such folder, and no hub id either: {str(name)!r}")
    return str(name)


def _device(name: str) -> torch.device | None:
    """The device; None to spread the model."""
    if name == "auto":
        return None
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as problem:
        raise ParameterError(f"device {name!r} cannot be used: {first_line(problem)}") from problem


def _model_class(config: Any, name: object, trust_remote_code: bool) -> Any:
    """The class that builds the model; refuses a model without a router of a known family."""
    for build in _CLASSES:
        skeleton = _skeleton(build, config, trust_remote_code)
        if skeleton is not None:
            _check_routers(skeleton)
            return build
    raise UnsupportedModelError(
        f"{str(name)!r} (model type {getattr(config, 'model_type', None)!r}) is no language model "
        "that transformers can build"
    )


def _check_routers(skeleton: nn.Module) -> None:
    """Refuse a model without routers, or with none that can be captured."""
    families = [family_of(router) for router in find_routers(skeleton).values()]
    if all(family is None or family.refused is not None for family in families):
        chosen_routers(skeleton, None)  # says why


def _skeleton(build: Any, config: Any, trust_remote_code: bool) -> nn.Module | None:
    """The model without weights; None if this class does not build such models."""
    make: Callable[..., nn.Module] = build.from_config
    try:
        with torch.device("meta"):
            return make(config, trust_remote_code=trust_remote_code)
    except Exception as problem:
        if "nrecognized configuration class" in str(problem):
            return None
        raise UnsupportedModelError(
            f"the model cannot be built: {first_line(problem)}"
        ) from problem


@contextmanager
def _explained(name: object, what: str) -> Iterator[None]:
    """Turn whatever transformers raises on bad input into one message."""
    try:
        yield
    except TielineError:
        raise
    except Exception as problem:  # a library of many authors: any class may come
        raise UnsupportedModelError(
            f"cannot load the {what} of {str(name)!r}: {first_line(problem)}"
        ) from problem


def load_smoothed(
    source: str | Path, model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """Load a smoothed model, in evaluation mode.

    Args:
        source: folder or hub id that `save_pretrained` of a smoothed model wrote.
        model_class: class of transformers to build; None for the one that the configuration names.
        options: of `from_pretrained`, such as `dtype` or `revision`.
    """
    model = load_pretrained(source, model_class=model_class, **options)
    if SMOOTH not in changes_of(model.config):
        raise UnsupportedModelError(
            f"{str(source)!r} holds no smoothed model: load it as any other, and smooth it"
        )
    model.eval()
    return model


def load_dense(
    name: str | Path,
    *,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    dtype: str = "auto",
) -> LoadedModel:
    """Load a model of any kind, in evaluation mode, with its tokenizer or None.

    Args:
        name: folder, hub id, or model.bin of llama2.c.
        tokenizer: tokenizer.bin of llama2.c, only with its model.
        revision: branch, tag or commit on the hub.
        dtype: a name in `DTYPES`.
    """
    require(dtype in DTYPES, f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
    if Path(name).suffix == ".bin":
        return _load_bin(Path(name), tokenizer, DTYPES[dtype])
    require(tokenizer is None, f"{str(name)!r} brings its own tokenizer, got {str(tokenizer)!r}")
    source = _source(name)
    options: dict[str, Any] = {"revision": revision}
    if isinstance(source, Path):
        options = {"local_files_only": True}
    with _explained(name, "configuration"):
        checkpoint = read_checkpoint(source, **options)
    with _explained(name, "weights (safetensors only: pickled weights are never loaded)"):
        model = load_pretrained(source, checkpoint=checkpoint, dtype=DTYPES[dtype], **options)
    return LoadedModel(model.eval(), _tokenizer(source, options), str(name))


def _load_bin(path: Path, tokenizer: str | Path | None, dtype: str | torch.dtype) -> LoadedModel:
    require(path.is_file(), f"no such file: {path}")
    model: Any = load_llama2c(path)
    words = None
    if tokenizer is not None:
        require(Path(tokenizer).is_file(), f"no such file: {tokenizer}")
        words = load_llama2c_tokenizer(tokenizer, model.config.vocab_size)
    model = model.to(dtype) if isinstance(dtype, torch.dtype) else model
    return LoadedModel(model, words, str(path))


def _tokenizer(source: str | Path, options: dict[str, Any]) -> Any:
    """The tokenizer; None for a model without one, such as an image model."""
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError):
        return None


@torch.no_grad()
def probe_output(
    model: PreTrainedModel, rows: int = 2, length: int = 16, seed: int = 0
) -> Float[Tensor, "*shape"]:
    """Return the model's first output (logits if it has any) for random tokens or pixels.

    Args:
        model: in evaluation mode.
        rows: sequences or images.
        length: tokens per sequence.
        seed: of the input.
    """
    generator, config = torch.Generator().manual_seed(seed), model.config
    if model.main_input_name == "pixel_values":
        size = config.image_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        pixels = torch.randn(rows, config.num_channels, *sides, generator=generator)
        return model(pixel_values=pixels.to(model.dtype))[0]
    if model.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {model.main_input_name!r}, not tokens or pixels"
        )
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    return model(input_ids=ids)[0]


NAMES: dict[str, tuple[str, ...]] = {
    "n_experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_top_k",
        "moe_k",
    ),
    "width": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "ffn_hidden_size",
        "intermediate_size",
    ),
    "hidden": ("hidden_size", "d_model"),
}
"""Names of each number in configurations; the first one present counts."""


class RoutedShape(NamedTuple):
    """Shape of a routed layer.

    Attributes:
        n_experts: routed experts N.
        k: experts chosen per token.
        width: hidden width H of an expert.
        hidden: width of the model.
        shared: experts that every token uses; 0 where the configuration names none.
        n_groups: groups of experts, 1 where routing is not group-limited.
        k_groups: groups that a token may choose from.
    """

    n_experts: int
    k: int
    width: int
    hidden: int
    shared: int = 0
    n_groups: int = 1
    k_groups: int = 1


def read_shape(
    name: str | Path | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> RoutedShape:
    """Read the shape of a model's routed layers from its config.json.

    Args:
        name: folder with a config.json or id on the hub; None for the model in the box.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.
    """
    source = SHIPPED_FOLDER if name is None else _source(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options |= {"local_files_only": True} if isinstance(source, Path) else {"revision": revision}
    with _explained(source, "configuration"):
        config = read_checkpoint(source, **options).config
    return shape_of(config)


def shape_of(config: Any) -> RoutedShape:
    """Return the shape that a configuration, or its text part, describes.

    Refuses a configuration without experts, and one whose experts per token is a list.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = {field: _number(config, field) for field in NAMES}
    groups = getattr(config, "n_group", None) or 1
    limited = (getattr(config, "topk_group", None) or 1) if groups > 1 else 1
    shared = getattr(config, "n_shared_experts", None) or 0
    return RoutedShape(**sizes, shared=int(shared), n_groups=int(groups), k_groups=int(limited))


def _number(config: Any, field: str) -> int:
    for name in NAMES[field]:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    kind = getattr(config, "model_type", type(config).__name__)
    raise UnsupportedModelError(
        f"the configuration of {kind!r} names no {field}: none of {', '.join(NAMES[field])} is a "
        "positive integer; give --experts, --topk, --expert-width and --hidden instead"
    )


def can_use_experts(model: nn.Module) -> bool:
    """Whether the experts of a model have more than one implementation."""
    can = getattr(model, "_can_set_experts_implementation", None)
    return bool(can()) if callable(can) else False


def use_experts(model: nn.Module, name: str | None) -> None:
    """Run the experts by "eager", "grouped_mm", "batched_mm" or another registered name.

    Args:
        model: a model of transformers.
        name: the implementation; None leaves the model as it is.
    """
    if name is None:
        return
    chooser: Any = model
    if not can_use_experts(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has one implementation of its experts: {name!r} cannot be set"
        )
    try:
        chooser.set_experts_implementation(name)
    except (ValueError, RuntimeError, ImportError) as problem:
        raise ParameterError(f"experts implementation {name!r}: {problem}") from problem
