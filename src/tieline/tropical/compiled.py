"""How kernels are compiled: by Numba, kept on disk for the next process.

Numba judges whether a stored kernel is stale by the file it is written in, not by the files of the
kernels it calls. So the store is named after the text of all kernel files: a change to any of them
starts a new one.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    from numba import config, njit
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "counting and listing cells and pieces needs Numba: pip install 'tieline[tropical]'"
    ) from error

__all__ = ["KERNELS", "compiled"]

SETTINGS: Any = config
"""Numba's settings, which it makes at run time."""

KERNELS = ("tied_sets", "flats", "enumeration", "linear", "pieces")
"""Files of this folder that hold compiled functions."""


def _store() -> Path:
    """Folder of the stored kernels: in NUMBA_CACHE_DIR, or in the user's cache."""
    here, digest = Path(__file__).parent, hashlib.sha256()
    for name in KERNELS:
        digest.update((here / f"{name}.py").read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (
        Path(SETTINGS.CACHE_DIR or Path(cache) / "tieline") / f"kernels-{digest.hexdigest()[:16]}"
    )


STORE = _store()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled on its first call, from the store where it is there already."""
    before = SETTINGS.CACHE_DIR
    SETTINGS.CACHE_DIR = str(STORE)
    try:
        return njit(cache=True)(function)
    except (RuntimeError, OSError):  # no folder to write to: compile in every process
        return njit(function)
    finally:
        SETTINGS.CACHE_DIR = before
