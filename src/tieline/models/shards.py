"""The files of a checkpoint: where each tensor stands, checked before any is read, and how to read.

    shards = open_shards(folder)            local files; `FetchedShards` come one by one
    shards.tensors["model.norm.weight"]     file, type, shape and place
    shards.read("model.norm.weight")        the tensor
    shards.copy("model.norm.weight", into)  the same into memory that is there, cast on the way

Tensors are read by their place in the file into memory of this process, never mapped: mapped pages
would count as its memory. `prefetch` asks the operating system to read tensors into its own cache
before they are asked for.
A missing, truncated or malformed file is refused when the shards are opened, by name.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from tieline.core.errors import TielineError, UnsupportedModelError, first_line, require
from tieline.core.untrusted_input import INDEX, weight_map

SINGLE = "model.safetensors"

LONGEST_HEADER = 100 << 20
"""Bytes of a header, the limit of the safetensors format itself."""

CHUNK = 4 << 20
"""Bytes that are read at a time, so that they are still in the processor's cache when cast."""

LINE = 64
"""Bytes of a line of memory, on which torch lets its tensors begin."""

AHEAD = 2 << 20
"""Bytes of one request to read ahead: the kernel cuts longer ones short."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors by their name in the files."""


class StoredTensor(NamedTuple):
    """One tensor: its file, type by the file's name for it, shape, and bytes [start, stop)."""

    file: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensor."""
        return DTYPES[self.kind]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.stop - self.start


class LazyTensor:
    """A tensor that is read when it is indexed, as a slice of `safetensors` is."""

    def __init__(self, shards: "Shards", name: str) -> None:
        """Stand for the tensor `name` of `shards`."""
        self._shards, self._name = shards, name

    def __getitem__(self, index: Any) -> Tensor:
        """Read the tensor and index it."""
        return self._shards.read(self._name)[index]

    def get_dtype(self) -> str:
        """Return the type, by its name in the file."""
        return self._shards.tensors[self._name].kind

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._shards.tensors[self._name].shape)


class Shards:
    """The tensors of local files.

    Attributes:
        tensors: where each tensor stands, by name.
        bytes_read: bytes of tensors read so far, each counted when it is asked for.
    """

    def __init__(self, folder: Path, headers: Mapping[str, Mapping[str, StoredTensor]]) -> None:
        """Take the headers of the files in `folder`, by name of the file."""
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        for file, header in headers.items():
            for name, stored in header.items():
                both = self.tensors.get(name, stored).file
                twice = f"the tensor {name!r} stands in two files, {both!r} and {file!r}"
                require(name not in self.tensors, twice, UnsupportedModelError)
                self.tensors[name] = stored
        self.bytes_read = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.size for stored in self.tensors.values())

    def path(self, file: str) -> Path:
        """The file, ready to be read."""
        return self.folder / file

    def lazy(self, name: str) -> LazyTensor:
        """A stand-in that is read when it is indexed."""
        return LazyTensor(self, name)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor, or some of its first axis."""
        self.path(self.tensors[name].file)
        stored = self._some(name, rows)
        data = aligned_bytes(stored.size, stored.start, stored.dtype)
        with self._open(stored.file) as handle:
            self._fill(handle, stored.start, data, name)
        self.bytes_read += stored.size
        return data.view(stored.dtype).reshape(stored.shape)

    def copy(self, name: str, into: Tensor, rows: slice | None = None) -> None:
        """Read a tensor into a contiguous one of its shape, cast to its type, piece by piece.

        Args:
            name: the tensor.
            into: where it goes.
            rows: part of its first axis, by default all.
        """
        self.path(self.tensors[name].file)
        stored, flat = self._some(name, rows), into.view(-1)
        wrong = f"{name!r} has the shape {stored.shape} instead of {tuple(into.shape)}"
        require(stored.shape == tuple(into.shape), wrong, UnsupportedModelError)
        self.bytes_read += stored.size
        if len(self._buffer) < CHUNK:
            self._buffer = torch.empty(CHUNK, dtype=torch.uint8, device="cpu")
        width = stored.dtype.itemsize
        with self._open(stored.file) as handle:
            for start in range(0, stored.size, CHUNK):
                piece = self._buffer[: min(CHUNK, stored.size - start)]
                self._fill(handle, stored.start + start, piece, name)
                first = start // width
                flat[first : first + len(piece) // width].copy_(piece.view(stored.dtype))

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the operating system to read these tensors ahead; it may ignore that."""
        if not hasattr(os, "posix_fadvise"):
            return
        for file, spans in self._spans(names).items():
            with self._open(file) as handle:
                for start, stop in spans:
                    for offset in range(start, stop, AHEAD):
                        size = min(AHEAD, stop - offset)
                        os.posix_fadvise(handle, offset, size, os.POSIX_FADV_WILLNEED)

    def release(self, names: Iterable[str]) -> None:
        """Take note that these tensors will not be read again."""

    def _spans(self, names: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
        """Parts of files that hold these tensors, neighbours joined."""
        by_file: dict[str, list[tuple[int, int]]] = {}
        for stored in sorted((self.tensors[name] for name in names), key=lambda x: x.start):
            spans = by_file.setdefault(stored.file, [])
            if spans and spans[-1][1] >= stored.start:
                spans[-1] = (spans[-1][0], max(spans[-1][1], stored.stop))
            else:
                spans.append((stored.start, stored.stop))
        return by_file

    def _some(self, name: str, rows: slice | None) -> StoredTensor:
        """Where some rows of a tensor are stored."""
        stored = self.tensors[name]
        if rows is None:
            return stored
        start, stop, _ = rows.indices(stored.shape[0])
        row = stored.size // stored.shape[0]
        begin = stored.start + start * row
        shape = (stop - start, *stored.shape[1:])
        return stored._replace(shape=shape, start=begin, stop=begin + (stop - start) * row)

    @contextmanager
    def _open(self, file: str) -> Iterator[int]:
        """Open a file of weights for reading."""
        try:
            handle = os.open(self.path(file), os.O_RDONLY)
        except OSError as problem:
            raise UnsupportedModelError(f"cannot read {file!r}: {first_line(problem)}") from problem
        try:
            yield handle
        finally:
            os.close(handle)

    def _fill(self, handle: int, offset: int, into: Tensor, name: str) -> None:
        """Fill a tensor of bytes from a place in a file, which may end too early by now."""
        array: Any = into.numpy()
        memory, done = memoryview(array), 0
        while done < len(memory):
            try:
                count = os.preadv(handle, [memory[done:]], offset + done)
            except OSError as problem:
                why = f"cannot read the tensor {name!r}: {first_line(problem)}"
                raise UnsupportedModelError(why) from problem
            cut = f"the file {self.tensors[name].file!r} was cut off while it was read"
            require(count > 0, cut, UnsupportedModelError)
            done += count


def aligned_bytes(size: int, start: int, dtype: torch.dtype, room: Tensor | None = None) -> Tensor:
    """Bytes that lie on a line of memory as byte `start` of a file lies on a line of the file.

    Matrix products round by how their operands lie in memory, and a tensor that is mapped from its
    file lies as it does there.

    Args:
        size: how many bytes.
        start: place in the file; 0 for the beginning of a line.
        dtype: of the tensor, whose numbers must not be cut.
        room: memory to use, of at least `size` + `LINE` bytes.
    """
    room = torch.empty(size + LINE, dtype=torch.uint8, device="cpu") if room is None else room
    first = (start - room.data_ptr()) % LINE
    first = -room.data_ptr() % LINE if first % dtype.itemsize else first
    return room[first : first + size]


def open_shards(folder: Path, files: Iterable[str] | None = None) -> Shards:
    """The tensors of a folder.

    Args:
        folder: with the files of a checkpoint.
        files: their names; by default those that its index names, or its only file.
    """
    names = list(files) if files is not None else shard_names(folder)
    shards = Shards(folder, {name: read_shard_header(folder / name) for name in names})
    index = folder / INDEX
    if files is None and index.is_file():
        lacking = sorted(set(weight_map(index)) - set(shards.tensors))
        require(
            not lacking,
            f"{INDEX} names {len(lacking)} tensors that no file has, such as {lacking[:1]}",
            UnsupportedModelError,
        )
    return shards


def shard_names(folder: Path) -> list[str]:
    """Names of the files that hold a model's weights."""
    index = folder / INDEX
    if not index.is_file():
        require((folder / SINGLE).is_file(), f"no {SINGLE} and no {INDEX} in {str(folder)!r}")
        return [SINGLE]
    return sorted(set(weight_map(index).values()))


def read_shard_header(path: Path) -> dict[str, StoredTensor]:
    """Where the tensors of a file stand; refuses a file that is missing, cut off or malformed."""
    require(path.is_file(), f"the file {path.name!r} is missing", UnsupportedModelError)
    try:
        with safe_open(path, framework="pt"):
            pass  # checks the header, and that the file is as long as it says
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            require(length <= LONGEST_HEADER, f"header of {length} bytes", UnsupportedModelError)
            header = json.loads(stream.read(length))
    except TielineError:
        raise
    except Exception as problem:  # whatever the library raises on bad input
        raise UnsupportedModelError(
            f"the file {path.name!r} is damaged or cut off ({first_line(problem)})"
        ) from problem
    return parse_header(path.name, header, 8 + length)


def parse_header(
    file: str, header: Mapping[str, Mapping[str, object]], base: int
) -> dict[str, StoredTensor]:
    """Where the tensors that a header lists stand.

    Args:
        file: name of the file.
        header: type, shape and offsets by tensor, as safetensors writes them.
        base: bytes of the file before the first tensor.
    """
    tensors = {}
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        kind, shape = str(facts["dtype"]), tuple(facts["shape"])  # type: ignore[call-overload]
        start, stop = facts["data_offsets"]  # type: ignore[misc]
        require(
            kind in DTYPES, f"{file}: {name!r} has type {kind}, not read", UnsupportedModelError
        )
        right = stop - start == math.prod(shape) * DTYPES[kind].itemsize
        require(right, f"{file}: {name!r} has not the bytes of its shape", UnsupportedModelError)
        tensors[name] = StoredTensor(file, kind, shape, base + start, base + stop)
    return tensors
