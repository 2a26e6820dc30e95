"""Loading a model that was saved smoothed, without the tokenizer that `hf.loading` asks for."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from tieline.errors import UnsupportedModelError, require
from tieline.hf.marks import load_pretrained, marks_of
from tieline.hf.smooth_saving import VARIANT, read_config, smoothed_config
from tieline.hf.smooth_state import restore_smoothing

__all__ = ["load_smoothed"]


def load_smoothed(source: str | Path, model_class: Any = None, **options: Any) -> Any:
    """The model in evaluation mode, smoothed as it was when it was saved.

    Args:
        source: folder or hub id that `save_pretrained` of a smoothed model wrote.
        model_class: class of transformers to build; by default a causal language model.
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
    if marks_of(config):  # upcycled or rerouted as well
        model = load_pretrained(
            source, config=config, model_class=model_class, variant=VARIANT, **options
        )
    else:
        build = AutoModelForCausalLM if model_class is None else model_class
        model = _read(build, source, {"config": config, "variant": VARIANT, **options})
    restore_smoothing(model, record)
    return model.eval()


def _read(build: Any, source: str | Path, options: dict[str, Any]) -> Any:
    model, report = build.from_pretrained(
        source, use_safetensors=True, output_loading_info=True, **options
    )
    missing = sorted(report["missing_keys"])
    require(
        not missing,
        f"the checkpoint {str(source)!r} lacks {len(missing)} tensors: {missing[:3]} ...",
        UnsupportedModelError,
    )
    return model
