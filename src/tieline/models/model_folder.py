"""Saving a model and its tokenizer in a folder, which is complete or absent."""

from pathlib import Path
from typing import Any

from tieline.core.errors import require
from tieline.core.files import check_folder, holds_model, whole_folder
from tieline.core.settings import require_setting


def save_model(
    folder: str | Path, model: Any, tokenizer: Any, *, overwrite: bool = False, **texts: str
) -> None:
    """Save a model in a folder, which is complete or absent.

    Args:
        folder: the folder to make.
        model: a model of transformers; None is refused.
        tokenizer: its tokenizer, or None.
        overwrite: whether a folder that holds a model may be replaced; another is only if empty.
        texts: further files by name, with "_" for "-" and without their suffix .json.
    """
    require(model is not None, "this result was read from a file: it has no model to save")
    _check_model_folder(Path(folder), overwrite)
    with whole_folder(Path(folder), replace=overwrite, kind=holds_model) as half:
        model.save_pretrained(half)
        if tokenizer is not None:
            tokenizer.save_pretrained(half)
        for name, text in texts.items():
            (half / f"{name.replace('_', '-')}.json").write_text(text)


def _check_model_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be made, or that may not be replaced."""
    check_folder(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    message = "{folder} is not empty: choose another folder or add {overwrite}"
    require_setting(overwrite, message, folder=folder)
    require(holds_model(folder), f"{folder} holds something else than a model: it is not replaced")
