"""What of a model is refused: a name, a folder, files, sizes, weights that are no numbers.

    model_source            the folder or hub id that a name stands for
    check_files             refuses named pipes, sockets and devices among the files of a folder
    check_stored            refuses sizes that the headers of the files in a folder cannot hold
    check_built             refuses a model on the meta device that is larger than its files
    check_finite_weights    refuses NaN and infinite weights, once they are loaded

Nothing of the size that a configuration states is allocated before the first four have passed it.
"""

import math
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tieline.core.errors import TielineError, UnsupportedModelError, require
from tieline.core.files import kind_of_file
from tieline.core.records import parse_json
from tieline.models.configuration import EXPERTS, config_tables
from tieline.models.shards import Stored, read_shard_header

OWN_LAYERS = '"tieline_switch"'
"""The model type, in a config.json, of a decoder of Tieline's own layers (`lab.training`)."""

ADAPTER = "adapter_config.json"


WIDTHS = (*EXPERTS, "vocab_size", "hidden_size", "d_model", "intermediate_size")
"""Sizes that are an axis of a tensor in the files."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

PACKED = 8
"""Most numbers that a quantised file holds in one byte."""

SLACK, SMALL = 1.5, 1 << 20
"""A model may have this many times the numbers of its files, and this many numbers besides:
transformers reports each missing tensor and wrong shape by name, once it has room for them."""


def model_source(name: str | Path) -> str | Path:
    """Return the folder, if there is one; else the hub id, if it can be one."""
    path = Path(name)
    if path.is_dir():
        _refuse_adapter(path)
        check_files(path)
        require((path / "config.json").is_file(), f"no config.json in the folder {str(name)!r}")
        _refuse_run(path)
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
    return f"{path}: is {kind_of_file(path)}, where the folder of a model or a hub id is needed"


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


def _refuse_run(folder: Path) -> None:
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
            f"{entry.name!r} in {str(folder)!r} is {kind_of_file(entry)}, not a file",
            UnsupportedModelError,
        )


def check_stored(fields: Mapping[str, Any], folder: Path) -> None:
    """Refuse widths and layers that the tensors in a folder cannot hold, by their headers.

    Each layer has a tensor at least, and each width is an axis of one: more layers than tensors,
    or a width above the numbers stored, fits no file.

    Args:
        fields: the configuration, as read from its file.
        folder: with the files of weights; one without any is passed.
    """
    tensors = [*_stored_tensors(sorted(folder.glob("*.safetensors")))]
    if not tensors:
        return
    numbers = PACKED * sum(tensor.size for tensor in tensors)
    for table in config_tables(fields):
        for names, most in ((LAYERS, len(tensors)), (WIDTHS, numbers)):
            for name in names:
                value = table.get(name)
                require(
                    type(value) is not int or value <= most,
                    f"config.json says {name}={value}, and the files have {len(tensors):,} tensors "
                    f"of {sum(tensor.size for tensor in tensors):,} bytes: they do not belong "
                    "together",
                    UnsupportedModelError,
                )


def _stored_tensors(files: Iterable[Path]) -> Iterator[Stored]:
    """Tensors of files of weights; a file that is damaged is refused where it is loaded."""
    for file in files:
        with suppress(TielineError):
            yield from read_shard_header(file).values()


def check_built(model: nn.Module, files: Iterable[str | Path], quantised: bool) -> None:
    """Refuse a model on the meta device that has more numbers than its files.

    Args:
        model: the model, before any memory is allocated for its weights.
        files: the files of its checkpoint.
        quantised: whether a byte of a file may hold several numbers.
    """
    stored = [*_stored_tensors(map(Path, files))]
    size = sum(PACKED * t.size if quantised else math.prod(t.shape) for t in stored)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    built = {name: p for name, p in model.named_parameters() if name not in tied}
    needed = sum(parameter.numel() for parameter in built.values())
    if not stored or needed <= SLACK * size + SMALL:
        return
    name, largest = max(built.items(), key=lambda item: item[1].numel())
    raise UnsupportedModelError(
        f"config.json describes a model of {needed:,} numbers, and the files hold at most "
        f"{size:,}: the largest tensor would be {name!r} of shape {tuple(largest.shape)}"
    )


CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of weights that can hold NaN and be compared."""


def check_finite_weights(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights, naming the first such tensor.

    One pass over the parameters, without a copy: a NaN anywhere makes minimum and maximum NaN.
    """
    wrong = {name: p for name, p in model.named_parameters() if not is_finite_tensor(p)}
    for name, tensor in wrong.items():
        others = f", and so are values of {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        raise UnsupportedModelError(_not_finite_message(name, tensor) + others)


def check_finite_tensor(name: str, tensor: Tensor) -> None:
    """Refuse a tensor with a NaN or an infinite number, by its name."""
    if not is_finite_tensor(tensor):
        raise UnsupportedModelError(_not_finite_message(name, tensor))


def is_finite_tensor(tensor: Tensor) -> bool:
    """Return whether all numbers are finite; true for types that hold no NaN."""
    if tensor.is_meta or not tensor.numel() or tensor.dtype not in CHECKED:
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool(low.isfinite()) and bool(high.isfinite())


def _not_finite_message(name: str, tensor: Tensor) -> str:
    """How many values of a tensor are NaN or infinite, and where the first is."""
    bad = ~tensor.detach().isfinite()
    return (
        f"weight {name!r}: {int(bad.sum()):,} of {bad.numel():,} values are NaN or infinite, the "
        f"first at {bad.nonzero()[0].tolist()}"
    )
