"""A folder of safetensors files and one JSON index, written whole or not at all.

    tieline.json        format, version, contents, and size and SHA-256 of every other file
    NAME.safetensors    tensors

Writing goes to a hidden folder beside the target, which is renamed when all of it is on the disk:
a process killed at any moment leaves no folder of that name, or a complete one. (It may leave a
hidden `.NAME.*.partial`, which nothing reads.)
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.jsonio import LONGEST, canonical

__all__ = ["INDEX", "SUFFIX", "check_target", "digest", "write_folder"]

INDEX = "tieline.json"
SUFFIX = ".safetensors"
Parts = Iterable[tuple[str, Mapping[str, Tensor]]]


def write_folder(
    directory: str | Path,
    kind: str,
    version: int,
    contents: Mapping[str, object],
    parts: Parts,
    overwrite: bool,
) -> None:
    """Write a folder, or raise and leave everything as it was.

    Args:
        directory: where to; parents are made.
        kind: format that the index states.
        version: version of that format.
        contents: JSON values of the index.
        parts: name and tensors of each file; taken one at a time, so that they need not all be in
            memory.
        overwrite: whether a folder of this kind may be replaced. Another folder never is, unless
            it is empty.
    """
    target = check_target(directory, kind, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{secrets.token_hex(8)}.partial"
    partial.mkdir()
    try:
        files = {name: _write_tensors(partial / f"{name}{SUFFIX}", part) for name, part in parts}
        index = {"format": kind, "version": version, "files": files, **contents}
        _write_synced(partial / INDEX, _text(index))
        _sync(partial)
        _move_into_place(partial, target, overwrite)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text(index: Mapping[str, object]) -> bytes:
    text = canonical(index).encode()
    require(len(text) <= LONGEST, f"the index has {len(text)} bytes, at most {LONGEST}", TraceError)
    return text


def check_target(directory: str | Path, kind: str, overwrite: bool) -> Path:
    """The absolute path of a folder to make, or an error if something is there that must stay."""
    target = Path(os.path.abspath(directory))
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return target
    require(overwrite, f"{target} exists: choose another place or allow overwriting", TraceError)
    require(
        target.is_dir() and not target.is_symlink() and _is_ours(target, kind),
        f"{target} exists and is no {kind} folder: it is left alone",
        TraceError,
    )
    return target


def _is_ours(target: Path, kind: str) -> bool:
    """Whether a folder holds what `write_folder` writes and nothing else."""
    names = {entry.name for entry in target.iterdir()}
    known = all(name == INDEX or name.endswith(SUFFIX) for name in names)
    if not known or INDEX not in names:
        return False
    with (target / INDEX).open("rb") as file:
        return f'"format":"{kind}"'.encode() in file.read(LONGEST)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    # clones, because tensors that share memory cannot be stored under two names
    save_file({name: value.detach().contiguous().clone() for name, value in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _move_into_place(partial: Path, target: Path, overwrite: bool) -> None:
    if overwrite and target.is_dir() and any(target.iterdir()):
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


def _sync(directory: Path) -> None:
    """Make the names in a folder last through a power cut, where the system can do that."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
