"""The parts of a folder that traces and the samples of summaries have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.checks import check_layer
from tieline.trace.folder_reader import Folder
from tieline.trace.layout import LAYER_TENSORS, TOKEN_IDS, check_tensor, kind_of
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace, check_epsilons

__all__ = [
    "MOST_LAYERS",
    "TOKEN_FILE",
    "TOKEN_KEYS",
    "LayerHead",
    "check_header",
    "head_to_json",
    "layer_tensors",
    "read_epsilons",
    "read_heads",
    "read_layer",
    "read_token_ids",
    "token_ids",
]

TOKEN_FILE = "tokens"  # noqa: S105
TOKEN_KEYS = ("tokens", "documents", "positions")
MOST_LAYERS = 4096
LONGEST_NAME = 1024
MOST_EPSILONS = 1024


class LayerHead(NamedTuple):
    """What is known of a layer before its tensors are read; `entry` is its part of the index."""

    name: str
    facts: LayerFacts
    entry: Mapping[str, object]

    def sizes(self, tokens: int, epsilons: int) -> dict[str, int]:
        """Sizes that the axes of its tensors must have."""
        known = {"k": self.facts.k, "experts": self.facts.n_experts}
        return {"tokens": tokens, "epsilons": epsilons, **known}


def head_to_json(name: str, facts: LayerFacts) -> dict[str, object]:
    """Name and facts of a layer as JSON values."""
    require(len(name) <= LONGEST_NAME, f"a layer's name has {len(name)} letters", TraceError)
    return {"name": name, "facts": asdict(facts)}


def read_heads(value: object, path: Path) -> list[LayerHead]:
    """Names and facts of all layers."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_LAYERS:
        raise TraceError(f"{path}: must list 1 ... {MOST_LAYERS} layers")
    heads = [_read_head(entry, path) for entry in value]
    names = {head.name for head in heads}
    require(len(names) == len(heads), f"{path}: two layers have the same name", TraceError)
    return heads


def _read_head(entry: object, path: Path) -> LayerHead:
    if not isinstance(entry, dict):
        raise TraceError(f"{path}: a layer must be a JSON object")
    name, facts = entry.get("name"), entry.get("facts")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise TraceError(f"{path}: a layer needs a name of 1 ... {LONGEST_NAME} letters")
    kinds = {part.name: type(part.default) for part in fields(LayerFacts)}
    kinds |= {"n_experts": int, "k": int}
    fits = isinstance(facts, dict) and {key: type(part) for key, part in facts.items()} == kinds
    if not isinstance(facts, dict) or not fits:
        raise TraceError(f"{path}: layer {name!r}: facts must be {sorted(kinds)}, each of its type")
    return LayerHead(name, LayerFacts(**facts), entry)


def read_epsilons(value: object, path: Path) -> tuple[float, ...]:
    """The ε grid."""
    fits = isinstance(value, list) and all(type(eps) in (int, float) for eps in value)
    if not isinstance(value, list) or not fits or len(value) > MOST_EPSILONS:
        raise TraceError(f"{path}: epsilons must be a list of numbers")
    epsilons = tuple(float(eps) for eps in value)
    check_epsilons(epsilons)
    return epsilons


def token_ids(trace: RoutingTrace) -> dict[str, Tensor]:
    """The tensors of the file of token ids."""
    return {name: getattr(trace, name) for name in TOKEN_KEYS}


def read_token_ids(folder: Folder) -> dict[str, Tensor]:
    """Token ids, documents and positions."""
    header = folder.header(TOKEN_FILE)
    require(
        set(header) == set(TOKEN_KEYS),
        f"{folder.path}: {TOKEN_FILE} must hold {TOKEN_KEYS}, got {sorted(header)[:5]}",
        TraceError,
    )
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in header.items():
        check_tensor(f"{folder.path}: {name}", TOKEN_IDS, kind_of(dtype), shape, sizes)
        sizes["tokens"] = shape[0]
    return folder.tensors(TOKEN_FILE)


def layer_tensors(layer: LayerTrace, broken_tokens: bool = False) -> dict[str, Tensor]:
    """The tensors of a layer's file; refuses values that no router can have made."""
    check_layer(layer, broken_tokens)
    fields = {name: getattr(layer, name) for name in LAYER_TENSORS}
    return {name: value for name, value in fields.items() if value is not None}


def check_header(folder: Folder, file: str, head: LayerHead, sizes: Mapping[str, int]) -> None:
    """Refuse a file whose tensors are not those of such a layer, without reading them."""
    header = folder.header(file)
    unknown = sorted(set(header) - set(LAYER_TENSORS))
    require(
        not unknown and "experts" in header,
        f"{folder.path}: layer {head.name!r}: tensors {unknown[:5]} unknown, or experts missing",
        TraceError,
    )
    sizes = dict(sizes)
    for name in _known_order(header):
        dtype, shape = header[name]
        what = f"{folder.path}: layer {head.name!r}: {name}"
        check_tensor(what, LAYER_TENSORS[name], kind_of(dtype), shape, sizes)
        sizes |= zip(LAYER_TENSORS[name].axes, shape, strict=True)


def read_layer(
    folder: Folder,
    file: str,
    head: LayerHead,
    sizes: Mapping[str, int],
    broken_tokens: bool = False,
) -> LayerTrace:
    """A layer, with the checks of its header and, the first time, of its values."""
    new = file not in folder.verified
    check_header(folder, file, head, sizes)
    layer = LayerTrace(name=head.name, facts=head.facts, **folder.tensors(file))
    if new:
        check_layer(layer, broken_tokens)
    return layer


def _known_order(names: Mapping[str, object]) -> Sequence[str]:
    return [name for name in LAYER_TENSORS if name in names]
