"""Loading a model to inspect: from a folder or the hub, safetensors only, refused early.

Whether a model is a Mixture of Experts of a known family is found out on a skeleton without weights
that its configuration describes, before any weight is read or downloaded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
)

from tieline.errors import ParameterError, TielineError, UnsupportedModelError, require
from tieline.hf.discovery import chosen_routers, find_routers
from tieline.hf.families import family_of
from tieline.hf.marks import load_pretrained, marks_of
from tieline.hf.shipped import SHIPPED_FOLDER, load_shipped_model, load_shipped_tokenizer
from tieline.hf.smooth_records import Smoothing
from tieline.hf.smooth_saving import VARIANT, read_config, smoothed_config
from tieline.hf.smooth_state import restore_smoothing

__all__ = ["DTYPES", "LoadedModel", "load_model"]

DTYPES: dict[str, str | torch.dtype] = {
    "auto": "auto",
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
"""Precisions by name; "auto" is the one of the checkpoint."""

_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)


class LoadedModel(NamedTuple):
    """A model in evaluation mode, its tokenizer, and the name it was asked for by."""

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
    """A Mixture-of-Experts model and its tokenizer; one that was saved smoothed is so again.

    Args:
        name: folder with a checkpoint, which needs no network, or id on the hub; None for the model
            that ships with the package.
        revision: branch, tag or commit on the hub.
        dtype: a name in `DTYPES`.
        device: "cpu", "cuda", "cuda:1", ...; "auto" spreads the model over what there is.
        trust_remote_code: whether code that comes with the model may run.
    """
    require(dtype in DTYPES, f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
    where = _device(device)
    if name is None:
        return _shipped(DTYPES[dtype], where)
    source = _source(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options |= {"local_files_only": True} if isinstance(source, Path) else {"revision": revision}
    config, smoothing = _configuration(name, source, options)
    marked = bool(marks_of(config))  # whose skeleton is not what the configuration alone describes
    build = load_pretrained if marked else _model_class(config, name, trust_remote_code)
    with _explained(name, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, config=config, **options)
    placed: dict[str, Any] = {"device_map": "auto"} if where is None else {}
    if smoothing is not None or marked:
        placed |= {"config": config}
    if smoothing is not None:
        placed |= {"variant": VARIANT}
    with _explained(name, "weights (safetensors only: pickled weights are never loaded)"):
        model = _read_weights(build, source, {"dtype": DTYPES[dtype], **placed, **options})
    if smoothing is not None:
        restore_smoothing(model, smoothing)
    return LoadedModel(
        model.eval() if where is None else model.to(where).eval(), tokenizer, str(name)
    )


def _read_weights(build: Any, source: str | Path, options: dict[str, Any]) -> Any:
    """The model of a checkpoint, refused if tensors are missing."""
    if build is load_pretrained:
        return load_pretrained(source, **options)
    model, report = build.from_pretrained(
        source, use_safetensors=True, output_loading_info=True, **options
    )
    _check_complete(source, list(report["missing_keys"]))
    return model


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


def _configuration(
    name: object, source: str | Path, options: dict[str, Any]
) -> tuple[Any, Smoothing | None]:
    """The model's configuration, and how the model is smoothed if it is."""
    with _explained(name, "configuration"):
        found, _ = PreTrainedConfig.get_config_dict(source, **options)
        if smoothed_config(found):
            return read_config(found)
        return AutoConfig.from_pretrained(source, **options), None


def _device(name: str) -> torch.device | None:
    """The device; None to spread the model."""
    if name == "auto":
        return None
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as problem:
        raise ParameterError(f"device {name!r} cannot be used: {_first_line(problem)}") from problem


def _model_class(config: Any, name: object, trust_remote_code: bool) -> Any:
    """The class that builds the model, which is refused if it has no router of a known family."""
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
    """Refuse a model without routers, and one none of whose routers can be captured."""
    families = [family_of(router) for router in find_routers(skeleton).values()]
    if all(family is None or family.refused is not None for family in families):
        chosen_routers(skeleton, None)  # says why


def _check_complete(name: object, missing: list[str]) -> None:
    require(
        not missing,
        f"the checkpoint of {str(name)!r} lacks {len(missing)} tensors, which would be random "
        f"numbers: {sorted(missing)[:3]} ...",
        UnsupportedModelError,
    )


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
            f"the model cannot be built: {_first_line(problem)}"
        ) from problem


@contextmanager
def _explained(name: object, what: str) -> Iterator[None]:
    """Turn what transformers raises on bad input into one message."""
    try:
        yield
    except Exception as problem:  # a library of many authors: any class may come
        raise UnsupportedModelError(
            f"cannot load the {what} of {str(name)!r}: {_first_line(problem)}"
        ) from problem


def _first_line(problem: BaseException) -> str:
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), repr(problem))
