"""The records that every measurement starts from, `LayerTrace` and `RoutingTrace`, and their parts.

A *selection score* is the number that a router ranks: logits, or scores plus a correction bias.
`LayerTrace.scores` holds the largest of them in order, `weights` what combines the outputs. The two
are never the same argument: a correction bias moves the choice and not the weight.

`LAYER_TENSORS` gives the type and the axes of every tensor of a layer. It checks records in memory,
when they are made, and the headers of files. `check_layer` checks the values of a trace that comes
from a file or goes into one.

    axis        size
    tokens      T, common to all layers
    ranks       C, k <= C <= E
    k           experts chosen
    ranks past k    C - k
    experts     E
    epsilons    points of the ε grid
    dim         dimension of the router's input

    take_tokens    some tokens of one layer
    identical_values  whether two records hold the same values, bit by bit

`tieline.trace.selection` selects from traces and joins them. Layers of a trace on disk are read
when they are indexed (`LazyLayers`).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.records import short_repr
from tieline.core.text import layer_label

Kind = Literal["integers", "floating-point numbers", "neither"]

MOST_EXPERTS = 1 << 16
MOST_LAYERS = 4096
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class TensorLayout(NamedTuple):
    """The kind of numbers that a tensor holds, and the names of its axes."""

    kind: Kind
    axes: tuple[str, ...]


_INTEGERS, _REALS = "integers", "floating-point numbers"

LAYER_TENSORS: Mapping[str, TensorLayout] = {
    "experts": TensorLayout(_INTEGERS, ("tokens", "ranks")),
    "scores": TensorLayout(_REALS, ("tokens", "ranks")),
    "weights": TensorLayout(_REALS, ("tokens", "k")),
    "group_gap": TensorLayout(_REALS, ("tokens",)),
    "distance": TensorLayout(_REALS, ("tokens",)),
    "near": TensorLayout(_INTEGERS, ("tokens", "epsilons")),
    "bias": TensorLayout(_REALS, ("experts",)),
    "inputs": TensorLayout(_REALS, ("tokens", "dim")),
    "faded": TensorLayout(_REALS, ("tokens", "ranks past k")),
    "used": TensorLayout(_INTEGERS, ("tokens",)),
}

TOKEN_IDS = TensorLayout(_INTEGERS, ("tokens",))

TOKEN_KEYS = ("tokens", "documents", "positions")
"""The tensors that identify the token of each row."""


def number_kind(dtype: torch.dtype) -> Kind:
    """Return the kind of numbers of a dtype; "neither" for booleans and complex numbers."""
    if dtype in INTS:
        return _INTEGERS
    return _REALS if dtype in FLOATS else "neither"


def check_tensor_layout(
    name: str, layout: TensorLayout, kind: Kind, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> None:
    """Raise unless a tensor has this kind and shape; axes missing from `sizes` have any size."""
    if kind != layout.kind:
        raise TraceError(f"{name} must hold {layout.kind}, got {kind}")
    fits = len(shape) == len(layout.axes) and all(
        sizes.get(axis, size) == size for axis, size in zip(layout.axes, shape, strict=True)
    )
    if not fits:
        expected = ", ".join(f"{axis}={sizes.get(axis, 'any')}" for axis in layout.axes)
        raise TraceError(f"{name} must have shape ({expected}), got {shape}")


Units = Literal["logits", "softmax", "sigmoid", "sqrtsoftplus"]

GroupScore = Literal["max", "top2sum"]


@dataclass(frozen=True)
class LayerFacts:
    """How one router chooses.

    Attributes:
        n_experts: number of experts E that the router scores.
        k: number of experts chosen per token.
        units: what a selection score is: the router's logits ("logits"), softmax probabilities
            ("softmax"), sigmoid scores ("sigmoid") or √softplus of the logits ("sqrtsoftplus"); a
            correction bias is added in these units.
        n_groups: number of expert groups, 1 where routing is not group-limited.
        k_groups: number of groups a token may choose its experts from.
        group_score: how a group is scored: its largest score, or the sum of its two largest.
        affine: whether the selection scores are affine in the router's input (no activation, no
            bias in other units), so that Euclidean distances to a tie are exact.
    """

    n_experts: int
    k: int
    units: Units = "logits"
    n_groups: int = 1
    k_groups: int = 1
    group_score: GroupScore = "max"
    affine: bool = True

    def __post_init__(self) -> None:
        experts, k, groups, chosen = self.n_experts, self.k, self.n_groups, self.k_groups
        _require_rule(
            1 <= k <= experts <= MOST_EXPERTS, f"1 <= k <= E <= 65536, got {k=}, E={experts}"
        )
        _require_rule(
            self.units in get_args(Units), f"units in {get_args(Units)}, got {self.units!r}"
        )
        _require_rule(
            self.group_score in get_args(GroupScore),
            f"group_score in {get_args(GroupScore)}, got {self.group_score!r}",
        )
        _require_rule(1 <= chosen <= groups, f"1 <= k_groups <= n_groups, got {chosen} of {groups}")
        _require_rule(
            experts % groups == 0, f"groups of equal size, got {experts} experts, {groups=}"
        )
        _require_rule(k <= self.reachable, f"{k=} experts to fit in {chosen} of {groups=}")

    @property
    def reachable(self) -> int:
        """Number of experts in the groups that a token chooses, from which it takes k."""
        return self.k_groups * (self.n_experts // self.n_groups)


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """Routing of T tokens in one layer; C ranks are kept, k <= C <= E, usually min(E, k + 4).

    Attributes:
        name: qualified name of the router module.
        facts: how the router chooses.
        experts: expert at each rank, of any integer type; the first k are the chosen ones.
        scores: selection scores of the first C ranks, descending, float32. For group-limited
            routers the ranks run over the experts of the chosen groups, and ranks past the last of
            these are minus infinity. None for ids-only traces.
        weights: combine weights of the first k ranks. None where the source has none.
        group_gap: score of the last chosen group minus that of the first one left out.
        distance: Euclidean distance of the router's input to the nearest tie (affine routers).
        near: number K(ε) of experts with a selection score above z_[k] - ε, per ε of the trace;
            among the experts of the chosen groups where routing is group-limited.
        bias: correction bias (E,) that the selection scores contain.
        inputs: the router's inputs, kept on request.
        faded: combine weights of the ranks past k, 0 where an expert is not used. Only a smoothed
            router has them: it uses the experts that top-k would choose, and some below.
        used: number of experts with a weight that is not zero, of a smoothed router.
    """

    name: str
    facts: LayerFacts
    experts: Int[Tensor, "tokens ranks"]
    scores: Float[Tensor, "tokens ranks"] | None = None
    weights: Float[Tensor, "tokens k"] | None = None
    group_gap: Float[Tensor, " tokens"] | None = None
    distance: Float[Tensor, " tokens"] | None = None
    near: Int[Tensor, "tokens epsilons"] | None = None
    bias: Float[Tensor, " experts"] | None = None
    inputs: Float[Tensor, "tokens dim"] | None = None
    faded: Float[Tensor, "tokens past"] | None = None
    used: Int[Tensor, " tokens"] | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        sizes = {"k": self.facts.k, "experts": self.facts.n_experts}
        for field_name, layout in LAYER_TENSORS.items():  # experts first: they fix T and C
            value = getattr(self, field_name)
            if value is not None:
                name = f"{layer_label(self.name)}: {field_name}"
                check_tensor_layout(
                    name, layout, number_kind(value.dtype), tuple(value.shape), sizes
                )
                sizes |= zip(layout.axes, value.shape, strict=True)
                sizes["ranks past k"] = sizes["ranks"] - sizes["k"]
        if not self.facts.k <= sizes["ranks"] <= self.facts.n_experts:
            raise TraceError(f"{layer_label(self.name)}: need k <= ranks <= E, got {sizes}")

    def tensors(self) -> dict[str, Tensor]:
        """Return the recorded tensors by name."""
        values = {name: getattr(self, name) for name in LAYER_TENSORS}
        return {name: value for name, value in values.items() if value is not None}

    def rows(self) -> dict[str, Tensor]:
        """Return the recorded tensors with one row per token: all but the bias."""
        return {name: x for name, x in self.tensors().items() if name != "bias"}

    @property
    def gap(self) -> Float[Tensor, " tokens"]:
        """Gap to the nearest tie that would change the choice, in float64.

        z_[k] - z_[k+1] within the chosen groups, or the gap between groups if that is smaller;
        infinite where all experts are chosen, so that none can enter.
        """
        inner = self.inner_gap
        return inner if self.group_gap is None else torch.minimum(inner, self.group_gap.double())

    @property
    def inner_gap(self) -> Float[Tensor, " tokens"]:
        """z_[k] - z_[k+1] within the chosen groups, in float64."""
        scores, k = self.known_scores(), self.facts.k
        if not self.has_gaps:
            raise TraceError(
                f"{layer_label(self.name)} has the chosen ranks only: no gaps without k+1"
            )
        if k == scores.shape[1]:
            return scores.new_full((len(scores),), torch.inf, dtype=torch.float64)
        return scores[:, k - 1].double() - scores[:, k].double()

    def known_scores(self) -> Float[Tensor, "tokens ranks"]:
        """Return the scores; raises if there are none."""
        if self.scores is None:
            raise TraceError(
                f"{layer_label(self.name)} has ids only: no gaps can be computed from it"
            )
        return self.scores

    @property
    def smoothed(self) -> bool:
        """Whether a token may use more experts than the k that top-k would choose."""
        return self.used is not None

    def combined(self) -> tuple[Float[Tensor, "tokens slots"], Int[Tensor, "tokens slots"]]:
        """Return weights and experts (T, slots) of all ranks with weights: k, more if smoothed."""
        if self.weights is None:
            raise TraceError(f"{layer_label(self.name)} has no combine weights")
        columns = [self.weights] if self.faded is None else [self.weights, self.faded]
        weights = torch.cat(columns, dim=1)
        return weights, self.experts[:, : weights.shape[1]]

    @property
    def has_gaps(self) -> bool:
        """Whether the scores of ranks k and k + 1 are recorded, or all experts are chosen."""
        facts, ranks = self.facts, self.experts.shape[1]
        return self.scores is not None and (ranks > facts.k or facts.k == facts.n_experts)


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Routing of the same T tokens in every layer.

    Attributes:
        layers: one record per MoE layer, in order of depth; read on demand if loaded from disk.
        tokens: token ids; -1 where unknown.
        documents: document that each token belongs to.
        positions: position of each token in its document.
        epsilons: the grid of ε at which `LayerTrace.near` counts, ascending.
        provenance: model, revision, dtype, versions, seed: JSON values only.
    """

    layers: Sequence[LayerTrace]
    tokens: Int[Tensor, " tokens"]
    documents: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    epsilons: tuple[float, ...] = ()
    provenance: dict[str, object] = field(default_factory=dict)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _require_rule(len(self.layers) > 0, "a routing trace needs at least one layer, got none")
        check_epsilons(self.epsilons)
        for name in TOKEN_KEYS:
            ids = getattr(self, name)
            sizes = {"tokens": self.n_tokens}
            check_tensor_layout(name, TOKEN_IDS, number_kind(ids.dtype), tuple(ids.shape), sizes)
        if isinstance(self.layers, tuple | list):  # layers on disk are checked when touched
            self._check_layers()

    @property
    def n_tokens(self) -> int:
        """Number of tokens T."""
        return self.tokens.numel()

    def layer(self, name: str) -> LayerTrace:
        """Return the layer whose router has this name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise TraceError(f"no layer {name!r} in the trace; it has {[x.name for x in self.layers]}")

    def save(self, directory: str | Path, overwrite: bool = False) -> None:
        """Save the trace in a folder, as `tieline.trace.save_trace` does."""
        from tieline.trace.store import save_trace

        save_trace(self, directory, overwrite)

    def export(self, path: str | Path, to: str | None = None, **options: Any) -> Path:
        """Write the trace in the form of another program, as `tieline.trace.export` does."""
        from tieline.trace.writers import export

        return export(self, path, cast("Any", to), **options)

    def _check_layers(self) -> None:
        names = [layer.name for layer in self.layers]
        _require_rule(len(set(names)) == len(names), f"layer names must differ, got {names}")
        for layer in self.layers:
            count = len(layer.experts)
            _require_rule(
                count == self.n_tokens, f"{self.n_tokens} tokens in all, got {count}", layer
            )
            columns = len(self.epsilons) if layer.near is None else layer.near.shape[1]
            _require_rule(
                columns == len(self.epsilons), f"one ε per column of near, got {columns}", layer
            )


def check_epsilons(epsilons: tuple[float, ...]) -> None:
    """Raise unless an ε grid is positive, finite and strictly ascending."""
    ascending = all(a < b for a, b in itertools.pairwise(epsilons))
    positive = all(math.isfinite(eps) and eps > 0 for eps in epsilons)
    _require_rule(
        ascending and positive, f"epsilons positive, finite and ascending, got {epsilons}"
    )


def _require_rule(condition: bool, rule: str, layer: LayerTrace | None = None) -> None:
    """Raise a `TraceError` that states the rule unless the condition holds."""
    where = "" if layer is None else f"{layer_label(layer.name)}: "
    require(condition, f"{where}need {rule}", TraceError)


_QUESTIONS_BY_DATA = {
    "scores": "gap quantiles, boundary mass, gap density and flip rates (no selection scores)",
    "rank k+1": "gap quantiles, boundary mass, gap density and flip rates (chosen ranks only)",
    "near": "experts within ε of the threshold and orders of ties (no counts over all experts)",
    "distance": "Euclidean distance to the nearest tie (not recorded)",
    "weights": "jump sizes and combine weights (no weights)",
    "inputs": "walks, slices and angular statistics (no router inputs)",
}


def questions_without_data(layers: Sequence[LayerTrace]) -> list[str]:
    """Return the analyses that the layers hold no data for, as sentences.

    An ids-only trace suffices for load, entropy, dead and cold experts, coalitions and agreement.
    """
    missing = [_unrecorded_data(layer) for layer in layers]
    return [
        text
        for need, text in _QUESTIONS_BY_DATA.items()
        if all(need in absent for absent in missing)
    ]


def _unrecorded_data(layer: LayerTrace) -> set[str]:
    """Return the keys of `_QUESTIONS_BY_DATA` that a layer did not record."""
    absent = {need for need in _QUESTIONS_BY_DATA if getattr(layer, need, layer) is None}
    return absent | ({"rank k+1"} if layer.scores is not None and not layer.has_gaps else set())


def smallest_id_dtype(n_experts: int) -> torch.dtype:
    """Return the smallest type that holds ids and counts of this many experts."""
    return torch.int16 if n_experts <= torch.iinfo(torch.int16).max else torch.int32


class LazyLayers(Sequence[LayerTrace]):
    """Sequence of layers that are loaded when indexed; the last one is cached."""

    def __init__(self, count: int, make: Callable[[int], LayerTrace]) -> None:
        self._count = count
        self._make = make
        self._last: tuple[int, LayerTrace] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LayerTrace: ...

    @overload
    def __getitem__(self, index: slice) -> "LazyLayers": ...

    def __getitem__(self, index: int | slice) -> "LayerTrace | LazyLayers":
        if isinstance(index, slice):
            chosen = range(self._count)[index]
            return LazyLayers(len(chosen), lambda i: self[chosen[i]])
        position = range(self._count)[index]
        if self._last is None or self._last[0] != position:
            self._last = (position, self._make(position))
        return self._last[1]


def map_layers(
    layers: Sequence[LayerTrace], change: Callable[[LayerTrace], LayerTrace]
) -> Sequence[LayerTrace]:
    """Apply a function to each layer: now for layers in memory, on access for lazy ones."""
    if isinstance(layers, LazyLayers):
        return LazyLayers(len(layers), lambda index: change(layers[index]))
    return tuple(change(layer) for layer in layers)


Index = slice | Int[Tensor, " chosen"] | Bool[Tensor, " tokens"]


def take_tokens(layer: LayerTrace, index: Index) -> LayerTrace:
    """Return some tokens of a layer: a view for a slice, a copy for an index or a mask."""
    return replace(layer, **{name: value[index] for name, value in layer.rows().items()})


def identical_values(first: object, second: object) -> bool:
    """Return whether two traces, summaries or parts of them hold the same values and types.

    Tensors must agree in type, shape and every bit, so that a NaN equals itself and 0 is not -0.
    Layers in memory equal the same layers on disk.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        first_bytes, second_bytes = (
            value.contiguous().flatten().view(torch.uint8) for value in (first, second)
        )
        return torch.equal(first_bytes, second_bytes)
    if isinstance(first, str):
        return first == second
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            identical_values(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, Sequence) and isinstance(second, Sequence):
        return len(first) == len(second) and all(map(identical_values, first, second))
    if is_dataclass(first) and not isinstance(first, type):
        return type(first) is type(second) and all(
            identical_values(getattr(first, item.name), getattr(second, item.name))
            for item in fields(first)
        )
    return type(first) is type(second) and first == second


def check_trace(trace: RoutingTrace) -> None:
    """Raise if a trace has impossible values, with the layer, the count and the first token."""
    for layer in trace.layers:
        check_layer(layer)


def check_layer(layer: LayerTrace, broken_tokens: bool = False) -> None:
    """Raise if a layer has impossible values, with the fault, the count and the first token.

    Experts lie in 0 ... E - 1 and differ within a token; scores descend and are finite for the
    chosen ranks, -inf allowed past them; gaps and distances are >= 0 or infinite; counts fit E.

    Args:
        layer: the layer.
        broken_tokens: whether tokens with non-finite scores are allowed, as in the sample of a
            summary; only their ids are checked.
    """
    _check_layer_ids(layer)
    if broken_tokens and layer.scores is not None:
        ends = layer.scores[:, [0, layer.facts.k - 1]]
        layer = take_tokens(layer, ends.isfinite().all(1))
    if layer.scores is not None:
        check_finite_scores(layer)
        _refuse_marked_rows(
            layer.scores[:, 1:] > layer.scores[:, :-1], layer, "scores that do not descend"
        )
    for name, value in layer.tensors().items():
        if name in ("weights", "faded", "inputs", "bias"):
            _refuse_marked_rows(~value.isfinite(), layer, f"{name} that are not finite")
        if name in ("group_gap", "distance"):
            _refuse_marked_rows(~(value >= 0), layer, f"{name} negative or not a number")


def check_finite_scores(layer: LayerTrace) -> None:
    """Raise if scores are not finite; minus infinity is allowed past the chosen ranks."""
    if layer.scores is not None:
        bad = layer.scores.isnan() | layer.scores.isposinf()
        bad[:, : layer.facts.k] |= layer.scores[:, : layer.facts.k].isneginf()
        _refuse_marked_rows(bad, layer, "scores that are not finite")


def _check_layer_ids(layer: LayerTrace) -> None:
    """Raise if expert ids or counts are out of range, or a token has an expert twice."""
    experts, most = layer.experts, layer.facts.n_experts
    _refuse_marked_rows(
        (experts < 0) | (experts >= most), layer, f"experts outside 0 ... {most - 1}"
    )
    if layer.used is not None:
        _refuse_marked_rows(
            (layer.used < 1) | (layer.used > most), layer, f"experts in use outside 1 ... {most}"
        )
    ordered = experts.sort(dim=1).values
    _refuse_marked_rows(ordered[:, 1:] == ordered[:, :-1], layer, "an expert twice in one token")
    if layer.near is not None:
        wrong = (layer.near < 0) | (layer.near > most)
        _refuse_marked_rows(wrong, layer, f"counts near the threshold outside 0 ... {most}")


def _refuse_marked_rows(wrong: Bool[Tensor, "*where"], layer: LayerTrace, what: str) -> None:
    """Raise if any row is marked as wrong, with the number of rows and the first one."""
    rows = (wrong.any(1) if wrong.ndim == 2 else wrong).nonzero()
    if len(rows):
        raise TraceError(
            f"{layer_label(layer.name)}: {what}: {len(rows)} of {len(wrong)}, the first at index "
            f"{int(rows[0])}"
        )
