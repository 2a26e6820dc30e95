"""Read untrusted files of routes: arrays, JSON, lines of text, and arrays inside JSON.

No pickles and no object arrays are read, and a header must state the actual size. A compressed
array may grow by the largest factor of its compression (1032) and to 4 GiB in all, a gzip of text
by a factor of 200 and 64 MiB. Every problem is a `TraceError` with the file and the field.
"""

import base64
import binascii
import csv
import io
import itertools
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from tieline.core.errors import TraceError, naming_unparsable_file, require
from tieline.core.files import require_file
from tieline.core.records import LONGEST, parse_json
from tieline.core.untrusted_input import (
    MOST_ARRAYS,
    MOST_BYTES,
    NPY_MAGIC,
    check_archive_arrays,
    check_gzip_size,
    open_unpacked,
)
from tieline.trace.store import check_header_length

MOST_JSON = 512 << 20
_DELIMITERS = ",;\t"
_DEFLATE_RATIO = 1032
_TENSOR_TYPES = {"I8", "I16", "I32", "I64", "U8", "U16", "U32", "F16", "F32", "F64"}


class _NpyHeader(NamedTuple):
    """Shape, order and type that an .npy file states."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """Read all arrays of a file by name ("" for npy); the format is that of its first bytes."""
    file = Path(path)
    require_file(file, TraceError)
    with naming_unparsable_file(file):
        with file.open("rb") as stream:
            magic = stream.read(6)
        if magic == NPY_MAGIC:
            return {"": _read_npy(file)}
        return _read_npz(file) if magic[:2] == b"PK" else _read_safetensors(file)


def _read_npy(file: Path) -> np.ndarray:
    """Map the array of an .npy file into memory; raises unless the header states its size."""
    with file.open("rb") as stream:
        header = _npy_header(stream, file)
        start = stream.tell()
    _require_stated_size(header.bytes, file.stat().st_size - start, file)
    if header.bytes == 0:
        return np.zeros(header.shape, header.dtype)
    order = "F" if header.fortran else "C"
    return np.memmap(file, header.dtype, "r", start, header.shape, order)


def _read_npz(file: Path) -> dict[str, np.ndarray]:
    """Read all arrays of an .npz archive; raises if it may unpack to more than its stated size."""
    with zipfile.ZipFile(file) as archive:
        check_archive_arrays(archive, file)
        members = archive.infolist()
        names = [member.filename.removesuffix(".npy") for member in members]
        pairs = zip(names, members, strict=True)
        return {name: _read_npz_member(archive, member, file) for name, member in pairs}


def _read_npz_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: Path) -> np.ndarray:
    """Read one array of an .npz archive."""
    name = f"{file}: {member.filename!r:.80}"
    stored = member.compress_type == zipfile.ZIP_STORED
    readable = stored or member.compress_type == zipfile.ZIP_DEFLATED
    require(readable, f"{name}: compressed in a way that npz files are not", TraceError)
    most = member.compress_size * (1 if stored else _DEFLATE_RATIO) + 64
    fits = member.compress_size <= file.stat().st_size and member.file_size <= min(most, MOST_BYTES)
    require(fits, f"{name}: states a size of {member.file_size} bytes", TraceError)
    with archive.open(member) as stream:
        header = _npy_header(stream, name)
        _require_stated_size(header.bytes, member.file_size - stream.tell(), name)
        data = stream.read()
    _require_stated_size(header.bytes, len(data), name)
    flat = np.frombuffer(data, header.dtype)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def _npy_header(stream: Any, name: object) -> _NpyHeader:
    """Read the header of an .npy; raises unless it states integers or real numbers."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    else:
        require(version == (2, 0), f"{name}: npy version {version} is not read", TraceError)
        read = np.lib.format.read_array_header_2_0
    header = _NpyHeader(*read(stream, max_header_size=10_000))
    numeric = header.dtype.kind in "iuf" and header.dtype.itemsize <= 8
    require(
        numeric, f"{name}: holds {header.dtype!s:.80}, not integers or real numbers", TraceError
    )
    require(all(size >= 0 for size in header.shape), f"{name}: shape {header.shape}", TraceError)
    return header


def _read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a safetensors file; raises unless they are integers or real numbers."""
    check_header_length(file)
    with safe_open(file, framework="numpy") as tensors:
        names = list(tensors.keys())
        require(len(names) <= MOST_ARRAYS, f"{file}: {len(names)} arrays", TraceError)
        for name in names:
            kind = tensors.get_slice(name).get_dtype()
            readable = kind in _TENSOR_TYPES
            require(readable, f"{file}: {name!r:.80} has type {kind}, not read", TraceError)
        return {name: tensors.get_tensor(name) for name in names}


def _require_stated_size(stated: int, actual: int, name: object) -> None:
    """Raise unless the data have the size that the header states."""
    require(
        stated == actual,
        f"{name}: the header states {stated} bytes, there are {actual}",
        TraceError,
    )


def read_json_values(path: str | Path) -> list[tuple[str, Any]]:
    """Return (label, value) of a JSON file, or of each line of a JSON Lines file.

    The label is the file and, if it has several values, the line.
    """
    file = Path(path)
    require_file(file, TraceError)
    with naming_unparsable_file(file):
        check_gzip_size(file)
        with open_unpacked(file) as stream:
            data = stream.read(MOST_JSON + 1)
    size = max(len(data), file.stat().st_size)
    require(size <= MOST_JSON, f"{file}: {size} bytes, at most {MOST_JSON} are read", TraceError)
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    require(bool(lines), f"{file}: is empty", TraceError)
    if len(lines) == 1 or not _is_json_line(lines[0][1]):
        return [(str(file), parse_json(data, str(file), MOST_JSON))]
    labelled = [(f"{file}: line {number}", line) for number, line in lines]
    return [(label, parse_json(line, label, MOST_JSON)) for label, line in labelled]


def _is_json_line(line: bytes) -> bool:
    """Return whether a line is a complete JSON value, as in a JSON Lines file."""
    try:
        parse_json(line, "", MOST_JSON)
    except TraceError:
        return False
    return True


def is_json_text(file: Path) -> bool:
    """Return whether a file, unpacked, begins with an object or a list of JSON."""
    with open_unpacked(file) as stream:
        return stream.read(64).lstrip()[:1] in (b"{", b"[")


def read_json_lines(file: Path, longest: int = LONGEST) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (label, object) of each line of a JSON Lines file, plain or gzip.

    Args:
        file: the file.
        longest: largest number of bytes of a line.
    """
    for label, line in _bounded_lines(file, longest):
        if line.strip():
            value = parse_json(line, label, longest)
            if not isinstance(value, dict):
                raise TraceError(f"{label}: must hold a JSON object")
            yield label, value


def read_csv_lines(
    file: Path, check_names: Callable[[list[str], str], None] | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (label, cells by column name) of each line of a CSV file, plain or gzip.

    Args:
        file: the file, in UTF-8, with a header line; lines before it begin with #. Its columns are
            divided by commas, semicolons or tabs, whichever the header has most of.
        check_names: called with the column names and their label; raises to refuse them.
    """
    lines = (line.decode() for _, line in _bounded_lines(file, LONGEST))
    before, header = 0, next(lines, "")
    while header.startswith("#"):
        before, header = before + 1, next(lines, "")
    delimiter = csv_delimiter(header)
    reader = csv.reader(
        itertools.chain([header], lines), delimiter=delimiter, skipinitialspace=True, strict=True
    )
    names = [name.strip() for name in next(reader, [])]
    if check_names is not None:
        check_names(names, f"{file}: line {before + 1}")
    unique = len(set(names)) == len(names)
    require(unique, f"{file}: line {before + 1}: a column comes twice", TraceError)
    for cells in filter(None, reader):
        label = f"{file}: line {before + reader.line_num}"
        full = len(cells) == len(names)
        require(full, f"{label}: {len(cells)} cells, the header has {len(names)}", TraceError)
        yield label, dict(zip(names, cells, strict=True))


def csv_delimiter(header: str) -> str:
    """Return what divides the columns of a header line: a comma, a semicolon or a tab."""
    return max(_DELIMITERS, key=header.count)


def csv_head(head: bytes) -> tuple[list[str], list[str]]:
    """Return the column names and the cells of the first line of a CSV file by its first bytes."""
    text = head.decode("utf-8", "replace")
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("#")]
    names, cells = (
        _csv_cells(line, csv_delimiter([*lines, ""][0])) for line in [*lines, "", ""][:2]
    )
    return [name.strip() for name in names], cells


def _csv_cells(line: str, delimiter: str) -> list[str]:
    """Return the cells of a CSV line; an empty list if it is none."""
    try:
        return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:
        return []


def _bounded_lines(file: Path, longest: int) -> Iterator[tuple[str, bytes]]:
    """Yield label and bytes of each line; raises for lines longer than `longest`."""
    number = 0
    with open_unpacked(file) as stream:
        while line := stream.readline(longest + 1):
            number += 1
            label = f"{file}: line {number}"
            message = f"{label}: longer than {longest} bytes: no line of routes is"
            require(len(line) <= longest, message, TraceError)
            yield label, line


def decode_base64(text: str, label: str) -> bytes:
    """Decode a base64 text; raises a `TraceError` if it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"{label}: is not base64: {error}") from error


def json_array(value: Any, label: str) -> np.ndarray:
    """Return a JSON value, or an array in memory, as an array of integers or real numbers.

    Args:
        value: nested lists, base64 of the bytes of an .npy file, an object with `data` (base64 of
            the raw bytes), `shape` and `dtype`, or an array or tensor.
        label: file and field, for errors.
    """
    if isinstance(value, str):
        return npy_array(decode_base64(value, label), label)
    if isinstance(value, Mapping):
        return _object_array(value, label)
    if hasattr(value, "detach"):  # a tensor of torch
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TraceError(f"{label}: lists of different lengths where an array is needed") from error
    numeric = array.dtype.kind in "iuf" and array.dtype.itemsize <= 8
    require(numeric, f"{label}: needs numbers, got {value!r:.60}", TraceError)
    return array


def npy_array(data: bytes, label: str) -> np.ndarray:
    """Return the array in the bytes of an .npy file."""
    require(
        data[:6] == NPY_MAGIC, f"{label}: holds no .npy array (its first bytes differ)", TraceError
    )
    with naming_unparsable_file(label):
        stream = io.BytesIO(data)
        header = _npy_header(stream, label)
        _require_stated_size(header.bytes, len(data) - stream.tell(), label)
        flat = np.frombuffer(data, header.dtype, offset=stream.tell())
        return flat.reshape(header.shape, order="F" if header.fortran else "C")


def _object_array(value: Mapping[str, object], label: str) -> np.ndarray:
    """Return the array in a JSON object with data (base64), shape and dtype."""
    data, shape, dtype = (value.get(name) for name in ("data", "shape", "dtype"))
    sizes = shape if isinstance(shape, list) else []
    has_shape = bool(sizes) and all(type(size) is int and size >= 0 for size in sizes)
    has_data = isinstance(data, str) and isinstance(dtype, str) and dtype in RAW_TYPES
    require(
        has_shape and has_data,
        f"{label}: an array in an object needs data (base64), shape (whole numbers) and dtype "
        f"(one of {', '.join(RAW_TYPES)}), got {str(dict(value))[:80]}",
        TraceError,
    )
    return raw_array(decode_base64(str(data), label), str(dtype), tuple(sizes), label)


RAW_TYPES = ("int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64")


def raw_array(data: bytes, dtype: str, shape: tuple[int, ...], label: str) -> np.ndarray:
    """Return little-endian bytes as an array; raises unless dtype and shape fill them exactly."""
    kind = np.dtype(dtype).newbyteorder("<")
    _require_stated_size(math.prod(shape) * kind.itemsize, len(data), label)
    return np.frombuffer(data, kind).reshape(shape)
