"""What of files from outside is refused before any library that reads them is imported.

Nothing here needs torch, numpy or transformers: a command that refuses its input takes the memory
of its own start and of a header. Nothing of the size that a file states is allocated.
"""

import ast
import codecs
import gzip
import io
import json
import math
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tieline.core.errors import TraceError, UnsupportedModelError, naming_unparsable_file, require
from tieline.core.files import file_kind_text, require_file
from tieline.core.records import parse_json

MOST_LAYERS, MOST_EXPERTS, MOST = 10_000, 1 << 20, 1 << 40
DEEPEST = 16

EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
"""Names of the number of experts; `CHOSEN` of how many a token chooses."""

CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)


OWN_LAYERS = '"tieline_switch"'
"""The model type, in a config.json, of a decoder of Tieline's own layers (`lab.training`)."""

ADAPTER = "adapter_config.json"

QUANTISED = "quantization"
"""The table of a configuration by which mlx states its quantisation."""


HIDDEN = ("hidden_size", "d_model")
WIDTHS = (*EXPERTS, "vocab_size", "intermediate_size", "moe_intermediate_size")
"""Sizes that are an axis of a tensor in the files, whose other axis is one of `HIDDEN`."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

PACKED = 8
"""Most numbers that a quantised file holds in one byte."""

SLACK, SMALL = 1.5, 1 << 20
"""A model may have this many times the numbers of its files, and this many numbers besides:
transformers reports each missing tensor and wrong shape by name, once it has room for them."""

LONGEST_HEADER = 100 << 20
"""Bytes of a header, the limit of the safetensors format itself."""

LARGEST_CONFIG, LARGEST_INDEX = 16 << 20, 256 << 20
"""Bytes of a config.json and of an index of shards that are read."""

INDEX = "model.safetensors.index.json"

MOST_BYTES, MOST_ARRAYS = 4 << 30, 1024
GZIP_MAGIC, ZIP_MAGIC, NPY_MAGIC = b"\x1f\x8b", b"PK", b"\x93NUMPY"
LONGEST_NPY_HEADER = 10_000
GZIP_RATIO, GZIP_FREE = 200, 64 << 20
"""An archive may unpack to this many times its size, plus this many bytes: ids of experts hardly
repeat, whatever packs them."""

ROUTE_ARRAYS = ("routed_experts", "rollout_routed_experts", "routing_replay_out")
ROUTE_AXES = "needs the axes (tokens, layers, k) or (sequences, length, layers, k)"
"""Names of arrays of routes, and their axes."""


def admit_source(name: object, trust_remote_code: bool = False) -> None:
    """Refuse a local model, archive or file that its own bytes show to be unfit.

    What this passes is checked again where it is read, by the same functions and by those that
    need the libraries.

    Args:
        name: what a command was given; anything but an existing file or folder is passed.
        trust_remote_code: whether code that comes with a model may run.
    """
    path = Path(name) if isinstance(name, str | Path) else None
    if path is None or not path.exists():
        return
    if not path.is_dir():
        require_file(path, TraceError)
        check_archive(path)
        return
    check_files(path)
    if (path / ADAPTER).is_file() or (path / "config.json").is_file():
        _check_model_folder(model_source(path), trust_remote_code)


def _check_model_folder(folder: str | Path, trust_remote_code: bool) -> None:
    """Refuse a configuration that no model has, that fetches code, or that its files do not fit."""
    fields = _config_fields(Path(folder))
    check_config_sizes(fields)
    if not trust_remote_code:
        refuse_fetched_kernels(fields)
    check_stored(fields, Path(folder))


def _config_fields(folder: Path) -> Mapping[str, Any]:
    """The fields of the configuration in a folder."""
    file = folder / "config.json"
    with file.open("rb") as stream:
        data = parse_json(stream.read(LARGEST_CONFIG + 1), str(file), LARGEST_CONFIG)
    return _json_object(data, file)


def _json_object(value: object, file: Path) -> Mapping[str, Any]:
    """The fields that the JSON of a file consists of; refuses JSON that is no table."""
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(f"{file}: holds {value!r:.40}, where fields are needed")
    return value


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index says.

    Refuses an index that is none, and names that lead out of its folder.
    """
    with index.open("rb") as stream:
        data = parse_json(stream.read(LARGEST_INDEX + 1), str(index), LARGEST_INDEX)
    files = _json_object(_json_object(data, index).get("weight_map"), index)
    for file in {name if isinstance(name, str) else repr(name) for name in files.values()}:
        fits = Path(file).name == file and file.endswith(".safetensors") and file.isprintable()
        require(
            fits,
            f"{index}: names {file!r:.200}, which is no safetensors file beside it",
            UnsupportedModelError,
        )
    return dict(files)


def model_source(name: str | Path) -> str | Path:
    """Return the folder, if there is one; else the hub id, if it can be one."""
    path = Path(name)
    if path.is_dir():
        _refuse_adapter(path)
        check_files(path)
        require((path / "config.json").is_file(), f"no config.json in the folder {str(name)!r}")
        _refuse_training_run(path)
        _config_fields(path)
        if (path / INDEX).is_file():
            weight_map(path / INDEX)
        return path
    if path.exists() or path.suffix.lower() in (".gguf", ".safetensors"):
        raise UnsupportedModelError(file_advice(path))
    segments = str(name).split("/")
    is_id = (
        isinstance(name, str)
        and len(segments) <= 2
        and all(segments)
        and segments[0] not in (".", "..")
    )
    require(is_id, f"no such folder, and no hub id either: {str(name)!r}")
    return str(name)


def file_advice(path: Path) -> str:
    """Return what to give instead of a file where a model is needed."""
    if path.suffix.lower() == ".gguf":
        return (
            f"{path}: a GGUF runs in llama.cpp alone: tieline capture {path} --engine llama.cpp, "
            f"or tieline diff MODEL llama.cpp:{path}"
        )
    if not path.exists():
        return f"{path}: no such file"
    if path.suffix.lower() == ".safetensors":
        folder = path.parent
        return f"{path}: is one file of a model: give the folder, {str(folder)!r}"
    return f"{path}: is {file_kind_text(path)}, where the folder of a model or a hub id is needed"


def _refuse_adapter(folder: Path) -> None:
    """Refuse the folder of an adapter, for which transformers would fetch another model."""
    file = folder / ADAPTER
    if not file.is_file():
        return
    fields = parse_json(file.read_bytes()[: 1 << 20], str(file))
    base = fields.get("base_model_name_or_path") if isinstance(fields, Mapping) else None
    raise UnsupportedModelError(
        f"{str(folder)!r} is an adapter of {str(base)!r:.200}: merge it into that model "
        "(merge_and_unload of peft) and give the folder of the merged one"
    )


def _refuse_training_run(folder: Path) -> None:
    """Refuse the folder of a training run and the model in it, naming the one that is readable."""
    inside = (folder / "model" / "config.json").is_file()
    run = folder if inside else folder.parent
    if not inside and OWN_LAYERS not in (folder / "config.json").read_text(errors="replace"):
        return
    what = "the folder of a training run" if inside else "a model of Tieline's own layers"
    stock = run / "stock"
    raise UnsupportedModelError(
        f"{str(folder)!r} is {what}: its form for transformers is {str(stock)!r}"
        if stock.is_dir()
        else f"{str(folder)!r} is {what}, which has no form for transformers: its router or gate "
        "is none that transformers knows"
    )


def check_files(folder: Path) -> None:
    """Refuse a folder with a named pipe, socket or device, which would be waited for."""
    for entry in folder.iterdir():
        mode = entry.stat().st_mode if entry.exists() else stat.S_IFREG
        plain = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        require(
            plain,
            f"{entry.name!r} in {str(folder)!r} is {file_kind_text(entry)}, not a file",
            UnsupportedModelError,
        )


def check_config_sizes(config: Mapping[str, Any]) -> None:
    """Refuse a configuration, as read from its file, whose sizes no model has.

    Layers, experts and all other numbers are bounded; 1 <= k <= E experts are chosen, from
    1 <= g <= G groups of equal size.
    """
    for table in config_tables(config):
        for name, value in table.items():
            if type(value) is int:
                _require_size(
                    abs(value) <= _largest_size(name),
                    name,
                    value,
                    f"at most {_largest_size(name):,}",
                )
        experts, chosen = _first_size(table, EXPERTS), _first_size(table, CHOSEN)
        groups, taken = _first_size(table, ("n_group",)), _first_size(table, ("topk_group",))
        if experts is not None and experts[1] >= 1 and chosen is not None:
            rule = f"1 <= {chosen[0]} <= {experts[0]}={experts[1]}"
            _require_size(1 <= chosen[1] <= experts[1], *chosen, rule)
        if groups is not None and groups[1] >= 1 and taken is not None:
            rule = f"1 <= {taken[0]} <= {groups[0]}={groups[1]}"
            _require_size(1 <= taken[1] <= groups[1], *taken, rule)


def _largest_size(name: str) -> int:
    """Largest value that a field of this name may have."""
    if name.endswith(("layers", "n_layer")):
        return MOST_LAYERS
    return MOST_EXPERTS if name in (*EXPERTS, *CHOSEN) else MOST


def _require_size(holds: bool, name: str, value: int, rule: str) -> None:
    """Refuse a size that breaks a rule, naming field, value and rule."""
    if not holds:
        raise UnsupportedModelError(f"the configuration says {name}={value}: need {rule}")


def _first_size(table: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of these fields that is an integer, with its value; None without one."""
    return next(((name, table[name]) for name in names if type(table.get(name)) is int), None)


def config_tables(value: Any, depth: int = DEEPEST) -> Iterator[Mapping[str, Any]]:
    """Yield every table of a configuration: that of a text model may be inside another."""
    if isinstance(value, Mapping) and depth > 0:
        yield value
        for inner in value.values():
            yield from config_tables(inner, depth - 1)


class StoredSize(NamedTuple):
    """Numbers of a tensor by its shape, and its bytes in the file."""

    numbers: int
    bytes: int


def stored_tensors(files: Iterable[Path]) -> list[StoredSize]:
    """Sizes of the tensors of safetensors files; a damaged file is refused where it is loaded."""
    return [size for file in files for size in _header_sizes(file)]


def _header_sizes(file: Path) -> list[StoredSize]:
    """Sizes that the header of a safetensors file states; none if it is not true of the file."""
    sizes = []
    try:
        for facts in tensor_headers(file).values():
            start, stop = facts["data_offsets"]
            if not 0 <= start <= stop <= file.stat().st_size:
                return []
            sizes.append(StoredSize(math.prod(facts["shape"]), stop - start))
    except (OSError, ValueError, TypeError, LookupError):
        return []
    return sizes


def tensor_headers(file: Path) -> dict[str, Any]:
    """What a safetensors file states of its tensors, by name; nothing if it cannot be read."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length <= LONGEST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return {}
    tensors = header if isinstance(header, dict) else {}
    return {name: facts for name, facts in tensors.items() if name != "__metadata__"}


def most_numbers(tensors: Iterable[StoredSize], quantised: bool) -> int:
    """Most numbers that these tensors hold; a byte of a quantised one may hold several."""
    return sum(PACKED * tensor.bytes if quantised else tensor.numbers for tensor in tensors)


def room_for_numbers(stored: int) -> float:
    """Numbers that a model may have whose files hold `stored`."""
    return SLACK * stored + SMALL


def check_stored(fields: Mapping[str, Any], folder: Path) -> None:
    """Refuse widths and layers that the tensors in a folder cannot hold, by their headers.

    Each layer has a tensor at least, and each width is an axis of a matrix whose other axis is the
    width of the model: more layers than tensors, or a matrix of more numbers than are stored, fits
    no file.

    Args:
        fields: the configuration, as read from its file.
        folder: with the files of weights; one without any is passed.
    """
    tensors = stored_tensors(sorted(folder.glob("*.safetensors")))
    if not tensors:
        return
    quantised = any(
        key in table
        for table in config_tables(fields)
        for key in ("quantization_config", QUANTISED)
    )
    room = room_for_numbers(most_numbers(tensors, quantised))
    for table in config_tables(fields):
        for sizes, needed in _least_numbers(table):
            most = len(tensors) if sizes[0] in LAYERS else room
            stated = " and ".join(f"{name}={table[name]}" for name in sizes)
            require(
                needed <= most,
                f"config.json says {stated}, and the files hold {len(tensors):,} tensors in "
                f"{sum(tensor.bytes for tensor in tensors):,} bytes: they do not belong together",
                UnsupportedModelError,
            )


def _least_numbers(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Sizes of a configuration with the tensors, or the numbers of a matrix, that they need."""
    sizes = {name: n for name in (*LAYERS, *HIDDEN, *WIDTHS) if type(n := table.get(name)) is int}
    hidden = next((name for name in HIDDEN if name in sizes), None)
    for name, size in sizes.items():
        if hidden is None or name in (*LAYERS, *HIDDEN):
            yield (name,), size
        else:
            yield (name, hidden), size * sizes[hidden]


KERNEL = re.compile(r"_implementation(_internal)?$")
"""Fields that name the code of a layer; a name with a slash is fetched from the hub and run."""


def refuse_fetched_kernels(fields: Mapping[str, Any]) -> None:
    """Refuse a configuration that names code on the hub, which transformers would fetch and run."""
    for table in config_tables(fields):
        for name, value in table.items():
            if KERNEL.search(str(name)):
                _refuse_fetched_kernel(str(name), value)


def _refuse_fetched_kernel(name: str, value: Any) -> None:
    """Refuse a field that names code on the hub, which transformers would fetch and run."""
    for kernel in value.values() if isinstance(value, Mapping) else [value]:
        require(
            not (isinstance(kernel, str) and "/" in kernel),
            f"the configuration says {name}={kernel!r:.200}, code that would be fetched and run: "
            "remove the field, or trust it with --trust-remote-code (trust_remote_code=True)",
            UnsupportedModelError,
        )


def check_archive(file: Path) -> None:
    """Refuse a zip or gzip that its size or its headers show to hold no routes."""
    with file.open("rb") as stream:
        magic = stream.read(2)
    if magic == GZIP_MAGIC:
        check_gzip_size(file)
    elif magic == ZIP_MAGIC:
        with naming_unparsable_file(file), zipfile.ZipFile(file) as archive:
            check_archive_arrays(archive, file)


def check_archive_arrays(archive: zipfile.ZipFile, file: Path) -> None:
    """Refuse too many arrays, too much to unpack, and routes of a shape that no routes have."""
    members = archive.infolist()
    many = f"{file}: has {len(members):,} arrays, and no record of routes has over {MOST_ARRAYS:,}"
    require(len(members) <= MOST_ARRAYS, many, TraceError)
    stated, most = sum(member.file_size for member in members), _most_unpacked(file)
    require(
        stated <= most,
        f"{file}: {file.stat().st_size:,} bytes that unpack to {stated:,}, more than the "
        f"{most:,} of any record of routes of that size",
        TraceError,
    )
    for member in members:
        name = member.filename.removesuffix(".npy")
        if name in ROUTE_ARRAYS:
            with archive.open(member) as stream:
                shape = _stated_shape(stream)
            fits = shape is None or 2 <= len(shape) <= 4
            require(fits, f"{file}: {name}: {ROUTE_AXES}, got {shape}", TraceError)


def require_readable(file: Path) -> None:
    """Refuse what is no file, and a file of more bytes than are read."""
    require_file(file, TraceError)
    size = file.stat().st_size
    require(size <= MOST_BYTES, f"{file}: {size} bytes, at most {MOST_BYTES} are read", TraceError)


def _stated_shape(stream: Any) -> tuple[int, ...] | None:
    """The shape that the header of an .npy states; None for a header that numpy would not read."""
    start = stream.read(8)
    width = {1: 2, 2: 4}.get(start[6]) if start[:6] == NPY_MAGIC and len(start) == 8 else None
    if width is None:
        return None
    text = stream.read(min(int.from_bytes(stream.read(width), "little"), LONGEST_NPY_HEADER))
    try:
        shape = ast.literal_eval(text.decode("latin1").strip())["shape"]
    except (ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError):
        return None
    return shape if isinstance(shape, tuple) else None


def _most_unpacked(file: Path) -> int:
    """Bytes that an archive may unpack to."""
    return GZIP_RATIO * file.stat().st_size + GZIP_FREE


class _LimitedGzip(gzip.GzipFile):
    """A gzip that refuses to unpack to more than `most` bytes."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, "rb")
        self.path, self.unpacked = file, 0
        self.most = min(MOST_BYTES, _most_unpacked(file))

    def read1(self, size: int = -1) -> bytes:
        """Read at most `size` bytes; raises once more than `most` were unpacked."""
        data = super().read1(1 << 18 if size < 0 else size)
        self.unpacked += len(data)
        if self.unpacked > self.most:
            raise TraceError(
                f"{self.path}: unpacks to more than {self.most} bytes from "
                f"{self.path.stat().st_size}: no log of routes does; unpack it yourself if you "
                "trust it"
            )
        return data

    def readinto(self, buffer: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fill a buffer with unpacked bytes."""
        data = self.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def open_unpacked(file: Path) -> io.BufferedReader:
    """Open a file for reading bytes, behind the byte order mark that a text may begin with.

    A gzip, told by its first bytes, is unpacked with a limit.
    """
    with file.open("rb") as stream:
        packed = stream.read(2) == GZIP_MAGIC
    opened: io.BufferedReader[Any] = (
        io.BufferedReader(_LimitedGzip(file), 1 << 18) if packed else file.open("rb")
    )
    if opened.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        opened.read(len(codecs.BOM_UTF8))
    return opened


def check_gzip_size(file: Path) -> None:
    """Unpack a gzip once without keeping it, so that a bomb is refused before memory is taken."""
    with naming_unparsable_file(file), open_unpacked(file) as stream:
        while isinstance(stream.raw, _LimitedGzip) and stream.read(1 << 20):
            pass
