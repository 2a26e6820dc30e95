"""Members of archives, read into memory by their exact names.

Nothing is unpacked to disk, so no name inside an archive can become a path; links and members
larger than expected are refused.
"""

import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from tieline.errors import require
from tieline.training.fetch import DataError, digest

__all__ = ["check_file", "tar_members"]


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
    found = digest(path)
    require(found == sha256, f"{path} has SHA-256 {found}, expected {sha256}", DataError)
    return path


def _contents(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> bytes:
    require(member.size <= most, f"{member.name}: {member.size} bytes, at most {most}", DataError)
    file = archive.extractfile(member)
    assert file is not None  # a regular member has contents
    return file.read(most + 1)
