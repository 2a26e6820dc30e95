"""A folder of safetensors files and one JSON index, written whole or not at all.

    tieline.json        format, version, contents, and size and SHA-256 of every other file
    NAME.safetensors    tensors

Nothing that is read is trusted: file names are never taken from the folder, the JSON is bounded,
each tensor file must have the size and the digest that the index states, the safetensors header is
bounded before it is parsed, and only plain integers and real numbers are read. Every problem is a
`TraceError` that names the file.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tieline.core.errors import TraceError, parsing_file, require
from tieline.core.files import file_digest, whole_folder
from tieline.core.records import LONGEST, canonical_json, parse_json
from tieline.core.setting_fields import TraceSettingError

INDEX = "tieline.json"
SUFFIX = ".safetensors"
TensorFiles = Iterable[tuple[str, Mapping[str, Tensor]]]


def write_folder(
    directory: str | Path,
    kind: str,
    version: int,
    contents: Mapping[str, object],
    files: TensorFiles,
    overwrite: bool,
) -> None:
    """Write a folder, or raise and change nothing.

    Args:
        directory: the folder to make, parents included.
        kind: name of the format.
        version: version of the format.
        contents: JSON values of the index.
        files: name and tensors of each file, taken one at a time.
        overwrite: whether a folder of this kind may be replaced; another is only if it is empty.
    """
    target = check_replaceable(directory, kind, overwrite)
    ours = partial(_is_tensor_folder, kind=kind)
    with whole_folder(target, replace=overwrite, kind=ours) as folder:
        written = {
            name: _write_tensor_file(folder / f"{name}{SUFFIX}", tensors) for name, tensors in files
        }
        index = {"format": kind, "version": version, "files": written, **contents}
        text = canonical_json(index).encode()
        if len(text) > LONGEST:
            raise TraceError(f"the index has {len(text)} bytes, at most {LONGEST}")
        (folder / INDEX).write_bytes(text)


def check_replaceable(directory: str | Path, kind: str, overwrite: bool) -> Path:
    """Return the absolute path of a folder to make; refuses to replace anything else."""
    target = Path(os.path.abspath(directory))
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return target
    if not overwrite:
        raise TraceSettingError(
            "{target} exists: choose another place or add {overwrite}", target=target
        )
    if not (target.is_dir() and not target.is_symlink() and _is_tensor_folder(target, kind)):
        raise TraceError(f"{target} exists and is no {kind} folder: it is left alone")
    return target


def _is_tensor_folder(target: Path, kind: str) -> bool:
    """Whether a folder holds what `write_folder` writes and nothing else."""
    names = {entry.name for entry in target.iterdir()}
    expected = all(name == INDEX or name.endswith(SUFFIX) for name in names)
    if not expected or INDEX not in names:
        return False
    with (target / INDEX).open("rb") as file:
        return f'"format":"{kind}"'.encode() in file.read(LONGEST)


def _write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    # clones, because tensors that share memory cannot be stored under two names
    """Write a safetensors file; returns its size and digest."""
    save_file({name: value.detach().contiguous().clone() for name, value in tensors.items()}, path)
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


HEADER_LIMIT = 4 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class TensorHeader(NamedTuple):
    """Type and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Folder:
    """An index and the tensor files that it lists, which are not read yet.

    Attributes:
        path: the folder.
        index: JSON values of the index.
        verified: files whose digest has been checked.
    """

    path: Path
    index: Mapping[str, object]
    verified: set[str] = field(default_factory=set)

    def header(self, name: str) -> dict[str, TensorHeader]:
        """Return types and shapes of the tensors of a file, without reading them."""
        path = self._tensor_path(name)
        stated = self._stated_tensors(name)["bytes"]
        size = path.stat().st_size
        require(size == stated, f"{path}: has {size} bytes, the index says {stated}", TraceError)
        return read_header(path)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Map the tensors of a file into memory; the first call checks its digest."""
        names, path = self.header(name), self._tensor_path(name)
        if name not in self.verified:
            with parsing_file(path):
                digest = file_digest(path)
            stated = self._stated_tensors(name)["sha256"]
            require(digest == stated, f"{path}: is damaged: its digest is not {stated}", TraceError)
            self.verified.add(name)
        with parsing_file(path), safe_open(path, framework="pt") as file:
            return {tensor: file.get_tensor(tensor) for tensor in names}

    def _tensor_path(self, name: str) -> Path:
        path = self.path / f"{name}{SUFFIX}"
        require(path.is_file(), f"{path}: is missing", TraceError)
        return path

    def _stated_tensors(self, name: str) -> Mapping[str, object]:
        files = self.index.get("files")
        stated = files.get(name) if isinstance(files, dict) else None
        if not isinstance(stated, dict) or stated.keys() != {"bytes", "sha256"}:
            raise TraceError(f"{self.path / INDEX}: states no size and digest of {name!r}")
        return stated


def read_index(directory: str | Path) -> dict[str, object]:
    """Read the JSON index of a folder."""
    file = Path(directory) / INDEX
    require(file.is_file(), f"{directory}: is no folder with a {INDEX}", TraceError)
    with parsing_file(file), file.open("rb") as stream:
        index = parse_json(stream.read(LONGEST + 1), str(file))
    if not isinstance(index, dict):
        raise TraceError(f"{file}: must hold a JSON object")
    return index


def open_folder(directory: str | Path, kind: str, version: int) -> Folder:
    """Open a folder of this kind and version."""
    index = read_index(directory)
    stated = index.get("format"), index.get("version")
    if not (stated == (kind, version) and type(stated[1]) is int):
        raise TraceError(
            f"{directory}: must be {kind} version {version}, got {stated[0]!r:.80} version "
            f"{stated[1]!r:.80}"
        )
    return Folder(Path(directory), index)


def check_header_length(path: Path) -> None:
    """Refuse a safetensors file whose header is longer than 4 MiB or than the file."""
    with parsing_file(path), path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = path.stat().st_size
    require(length <= min(HEADER_LIMIT, size), f"{path}: header of {length} bytes", TraceError)


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Return types and shapes of the tensors of a safetensors file, without reading them."""
    check_header_length(path)
    with parsing_file(path), safe_open(path, framework="pt") as file:
        names = list(file.keys())
        slices = {name: file.get_slice(name) for name in names}
        headers = {
            name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in slices.items()
        }
    for name, (dtype, _) in headers.items():
        require(dtype in DTYPES, f"{path}: {name!r:.80} has type {dtype}, not read", TraceError)
    return {
        name: TensorHeader(DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in headers.items()
    }
