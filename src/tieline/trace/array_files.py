"""Arrays from npy, npz and safetensors files of strangers.

No pickles, no object arrays, and no memory for what a header merely promises: the size that a
header states must be the size that is there. A compressed file may grow by what its compression can
do (1032 times) and to 4 GiB in all.
"""

import math
import zipfile
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from safetensors import safe_open

from tieline.errors import TraceError, require
from tieline.trace.folder_reader import check_header_length, parsing

__all__ = ["read_arrays"]

MOST_BYTES = 4 << 30
_MOST_ARRAYS = 64
_DEFLATE_RATIO = 1032
_TENSOR_TYPES = {"I8", "I16", "I32", "I64", "U8", "U16", "U32", "F16", "F32", "F64"}


class _Header(NamedTuple):
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of a file by name; the one of an npy file is called "".

    The format is told by the first bytes, not by the suffix.
    """
    file = Path(path)
    require(file.is_file(), f"{file}: no such file", TraceError)
    with parsing(file):
        with file.open("rb") as stream:
            magic = stream.read(6)
        if magic == b"\x93NUMPY":
            return {"": _read_npy(file)}
        return _read_npz(file) if magic[:2] == b"PK" else _read_safetensors(file)


def _read_npy(file: Path) -> np.ndarray:
    with file.open("rb") as stream:
        header = _npy_header(stream, file)
        start = stream.tell()
    _same_size(header.bytes, file.stat().st_size - start, file)
    if header.bytes == 0:
        return np.zeros(header.shape, header.dtype)
    order = "F" if header.fortran else "C"
    return np.memmap(file, header.dtype, "r", start, header.shape, order)


def _read_npz(file: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        require(len(members) <= _MOST_ARRAYS, f"{file}: {len(members)} arrays", TraceError)
        return {
            member.filename.removesuffix(".npy"): _read_member(archive, member, file)
            for member in members
        }


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: Path) -> np.ndarray:
    name = f"{file}: {member.filename!r:.80}"
    stored = member.compress_type == zipfile.ZIP_STORED
    known = stored or member.compress_type == zipfile.ZIP_DEFLATED
    require(known, f"{name}: compressed in a way that npz files are not", TraceError)
    most = member.compress_size * (1 if stored else _DEFLATE_RATIO) + 64
    fits = member.compress_size <= file.stat().st_size and member.file_size <= min(most, MOST_BYTES)
    require(fits, f"{name}: states a size of {member.file_size} bytes", TraceError)
    with archive.open(member) as stream:
        header = _npy_header(stream, name)
        _same_size(header.bytes, member.file_size - stream.tell(), name)
        data = stream.read()
    _same_size(header.bytes, len(data), name)
    flat = np.frombuffer(data, header.dtype)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def _npy_header(stream: IO[bytes], name: object) -> _Header:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    else:
        require(version == (2, 0), f"{name}: npy version {version} is not read", TraceError)
        read = np.lib.format.read_array_header_2_0
    header = _Header(*read(stream, max_header_size=10_000))
    plain = header.dtype.kind in "iuf" and header.dtype.itemsize <= 8
    require(plain, f"{name}: holds {header.dtype!s:.80}, not integers or real numbers", TraceError)
    require(all(size >= 0 for size in header.shape), f"{name}: shape {header.shape}", TraceError)
    return header


def _read_safetensors(file: Path) -> dict[str, np.ndarray]:
    check_header_length(file)
    with safe_open(file, framework="numpy") as tensors:
        names = list(tensors.keys())
        require(len(names) <= _MOST_ARRAYS, f"{file}: {len(names)} arrays", TraceError)
        for name in names:
            kind = tensors.get_slice(name).get_dtype()
            known = kind in _TENSOR_TYPES
            require(known, f"{file}: {name!r:.80} has type {kind}, not read", TraceError)
        return {name: tensors.get_tensor(name) for name in names}


def _same_size(stated: int, found: int, name: object) -> None:
    require(
        stated == found, f"{name}: the header states {stated} bytes, there are {found}", TraceError
    )
