"""Files and folders that are complete or absent, and the cache folder.

    write_whole      replace a file in one step
    whole_folder     fill a folder under a hidden name, which takes its place when it is complete
    check_target     refuse a path that cannot be written, before any work is done
    check_targets    the same for several outputs, none of them named twice
    json_target      the file that --json names
    file_digest      SHA-256 of a file
    cache_folder     where downloads, compiled kernels and results of claims are kept

A process killed at any moment leaves the old file or folder or the new one, and perhaps a hidden
`.NAME.*.partial`, which nothing reads.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from tieline.core.errors import require

__all__ = [
    "cache_folder",
    "check_target",
    "check_targets",
    "file_digest",
    "json_target",
    "whole_folder",
    "write_whole",
]


def cache_folder(name: str = "") -> Path:
    """Return the folder `name` of the user's cache; on Linux below `$XDG_CACHE_HOME`."""
    return platformdirs.user_cache_path("tieline", appauthor=False) / name


def check_target(path: Path) -> None:
    """Raise if `path` is a folder, or if its folder is missing or not writable."""
    require(not path.is_dir(), f"cannot write {path}: it is a folder")
    if _is_special(path):
        require(os.access(path, os.W_OK), f"cannot write {path}: it is not writable")
        return
    folder = Path(os.path.realpath(path)).parent
    require(folder.is_dir(), f"cannot write {path}: there is no folder {folder}")
    require(os.access(folder, os.W_OK), f"cannot write {path}: {folder} is not writable")


def check_targets(*paths: Path | None) -> None:
    """Raise if an output cannot be written or two are the same file; None stands for no output."""
    named = [path for path in paths if path is not None]
    places = {os.path.abspath(path) for path in named}
    require(len(places) == len(named), f"one file for two outputs: {[*map(str, named)]}")
    for path in named:
        check_target(path)


def json_target(json_to: str | None) -> Path | None:
    """Return the file that --json names; None for stdout ("-") and for no JSON."""
    return None if json_to in (None, "-") else Path(str(json_to))


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data` in one step.

    A symbolic link stays and its target is replaced; devices and pipes are written to directly.
    """
    if _is_special(path):
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))
    partial = _hidden(target)
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a hidden folder to fill, which becomes `path` unless the block raises.

    Args:
        path: the folder to make; its parents are made.
        replace: whether a folder that is not empty may be replaced; else `OSError` is raised.
    """
    target = path.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _hidden(target)
    partial.mkdir()
    try:
        yield partial
        for inner in (*partial.rglob("*"), partial):
            _sync(inner)
        _move_into_place(partial, target, replace)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_into_place(partial: Path, target: Path, replace: bool) -> None:
    if replace and target.is_dir() and any(target.iterdir()):
        old = partial.with_suffix(".old.partial")
        target.rename(old)
        try:
            partial.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(target)  # replaces an empty folder, refuses any other
    _sync(target.parent)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder: a device, pipe or socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _hidden(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, last through a power cut where the system can."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
