"""Output files that are there in full or not at all.

check_target    refuse a path that cannot be written to, before any work is done
check_targets   the same for several, none of them named twice
json_target     the file that --json names
write_whole     write beside the target, then rename: a process killed at any moment leaves the
                old file or the new one (and perhaps a hidden `.NAME.*.partial`)
"""

import os
import secrets
from pathlib import Path

from tieline.core.errors import require

__all__ = ["check_target", "check_targets", "json_target", "write_whole"]


def check_target(path: Path) -> None:
    """Refuse a path that is a folder, or whose folder is missing or closed to us."""
    require(not path.is_dir(), f"cannot write {path}: it is a folder")
    folder = path.absolute().parent
    require(folder.is_dir(), f"cannot write {path}: there is no folder {folder}")
    require(os.access(folder, os.W_OK), f"cannot write {path}: {folder} does not allow it")


def check_targets(*paths: Path | None) -> None:
    """Refuse outputs of which two are one file, or that cannot be written to; None is no output."""
    named = [path for path in paths if path is not None]
    places = {os.path.abspath(path) for path in named}
    require(len(places) == len(named), f"one file for two outputs: {[*map(str, named)]}")
    for path in named:
        check_target(path)


def json_target(json_to: str | None) -> Path | None:
    """The file that --json names; None for stdout ("-") and for no JSON at all."""
    return None if json_to in (None, "-") else Path(str(json_to))


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data` in one step."""
    target = path.absolute()
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
