"""Saving a smoothed model so that nobody can load it unsmoothed by mistake.

    config.json    {"model_type": "<a sentence>", "tieline_smoothing": {..., "config": {...}}}
    weights        model.tieline-smoothed.safetensors, and so with shards

The automatic classes of transformers refuse the model type and print the sentence; a class that is
named outright finds no weights of the usual name. `hf.loading.load_model` and
`hf.smooth_loading.load_smoothed` read both and smooth.
"""

import functools
import json
from typing import Any

from torch import nn

from tieline.errors import UnsupportedModelError, require
from tieline.hf.smooth_records import Smoothing, read_smoothing

__all__ = ["KEY", "VARIANT", "hook_saving", "read_config", "smoothed_config", "unhook_saving"]

KEY = "tieline_smoothing"
"""Key of the configuration under which the smoothing stands."""

VARIANT = "tieline-smoothed"
"""Part of the names of the files with the weights."""

INNER = "config"


def hook_saving(model: nn.Module, record: Smoothing) -> None:
    """From now on `save_pretrained` of the model and of its configuration tell of the record."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "save_pretrained"):
        return
    setattr(config, KEY, record.to_dict())
    config.__class__ = _telling_config(type(config))
    model.__class__ = _telling_model(type(model))


def unhook_saving(model: nn.Module) -> None:
    """The classes of model and configuration as they were."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, KEY):
        delattr(config, KEY)
        config.__class__ = type(config).__mro__[1]
        model.__class__ = type(model).__mro__[1]


@functools.cache
def _telling_config(cls: type) -> type:
    def to_json_string(self: Any, *args: Any, **kwargs: Any) -> str:
        inner = json.loads(cls.to_json_string(self, *args, **kwargs))  # type: ignore[attr-defined]
        smoothing = inner.pop(KEY, None) or getattr(self, KEY)
        kind = inner.get("model_type", cls.model_type)  # type: ignore[attr-defined]
        outer = {"model_type": sentence(kind), KEY: {**smoothing, INNER: inner}}
        return json.dumps(outer, indent=2, sort_keys=True) + "\n"

    return type(cls.__name__, (cls,), {"to_json_string": to_json_string, **_names(cls)})


@functools.cache
def _telling_model(cls: type) -> type:
    @functools.wraps(cls.save_pretrained)  # type: ignore[attr-defined]
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("variant") is None:
            kwargs["variant"] = VARIANT
        return cls.save_pretrained(self, save_directory, *args, **kwargs)  # type: ignore[attr-defined]

    return type(cls.__name__, (cls,), {"save_pretrained": save_pretrained, **_names(cls)})


def _names(cls: type) -> dict[str, str]:
    return {"__module__": cls.__module__, "__qualname__": cls.__qualname__}


def sentence(model_type: str) -> str:
    """The model type that transformers does not know and prints when it refuses."""
    return (
        f"{model_type} with routers smoothed by Tieline: it would not run as saved without it; "
        "load it with tieline.hf.load_smoothed"
    )


def smoothed_config(found: dict[str, Any]) -> bool:
    """Whether this configuration, as read from its file, is that of a smoothed model."""
    return KEY in found


def read_config(found: dict[str, Any]) -> tuple[Any, Smoothing]:
    """The model's own configuration and its smoothing, from a file that may be malformed."""
    from transformers import CONFIG_MAPPING

    told = found[KEY]
    inner = told.get(INNER) if isinstance(told, dict) else None
    require(
        isinstance(inner, dict),
        f"the configuration has {KEY!r} but no {INNER!r} of the model inside",
        UnsupportedModelError,
    )
    assert isinstance(inner, dict)
    kind = str(inner.get("model_type"))
    require(
        kind in CONFIG_MAPPING,
        f"the smoothed model is of type {kind!r}, which transformers does not know",
        UnsupportedModelError,
    )
    return CONFIG_MAPPING[kind].from_dict(inner), read_smoothing(told)
