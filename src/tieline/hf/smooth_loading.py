"""Loading a model that was saved smoothed, without the tokenizer that `hf.loading` asks for."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from tieline.errors import UnsupportedModelError, require
from tieline.hf.marks import load_pretrained
from tieline.hf.smooth_saving import VARIANT, read_config, smoothed_config
from tieline.hf.smooth_state import restore_smoothing

__all__ = ["load_smoothed"]


def load_smoothed(
    source: str | Path, model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """The model in evaluation mode, smoothed as it was when it was saved.

    Args:
        source: folder or hub id that `save_pretrained` of a smoothed model wrote.
        model_class: class of transformers to build; None for the one that the configuration names.
        options: of `from_pretrained`, such as `dtype` or `revision`.
    """
    revision = {"revision": options["revision"]} if "revision" in options else {}
    found, _ = PreTrainedConfig.get_config_dict(source, **revision)
    require(
        smoothed_config(found),
        f"{str(source)!r} holds no smoothed model: load it as any other, and smooth it",
        UnsupportedModelError,
    )
    config, record = read_config(found)
    model = load_pretrained(
        source, model_class=model_class, config=config, variant=VARIANT, **options
    )
    restore_smoothing(model, record)
    model.eval()
    return model
