"""Whether the hub can be asked for the files of a model.

The libraries of the hub try again and again to reach it, for each file that is not in the cache. It
is asked once here instead, and without an answer only files in the cache are used.
"""

from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

from tieline.core.errors import UnsupportedModelError, require

CONFIG = "config.json"
"""The file that is asked for."""

SECONDS = 10
"""Time in which the hub must answer."""


def hub_options(name: str, revision: str | None = None) -> dict[str, Any]:
    """Return options of `from_pretrained` for a hub id; refuses one that is nowhere to be had.

    Args:
        name: the id.
        revision: branch, tag or commit.
    """
    where = {"revision": revision}
    if hub_answers(name, revision):
        return where
    cached = isinstance(try_to_load_from_cache(name, CONFIG, revision=revision), str)
    require(
        cached,
        f"{name!r} is no local folder, and the hub ({constants.ENDPOINT}) is not reachable: give "
        "the folder of a model",
        UnsupportedModelError,
    )
    return {**where, "local_files_only": True}


def hub_answers(name: str, revision: str | None = None) -> bool:
    """Whether the hub answers a question about a model, be it with a refusal."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG, revision=revision), timeout=SECONDS)
    except Exception as problem:  # a library of many authors: any class may come
        return getattr(problem, "response", None) is not None
    return True
