"""How a model is smoothed, as frozen records that a configuration can hold."""

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tieline.errors import UnsupportedModelError, require

__all__ = ["LayerSmoothing", "Smoothing", "read_smoothing"]

VERSION = 1
"""Of the form in which a configuration holds the record."""

MOST_LAYERS, MOST_EXPERTS = 10_000, 1_000_000
"""No record that is read holds more: a file decides on memory nowhere."""


@dataclass(frozen=True)
class LayerSmoothing:
    """How one router is smoothed.

    Attributes:
        name: its qualified name.
        family: name of its family.
        k: experts that are always in.
        n_experts: experts that it ranks.
        k_max: slots per token.
        epsilon: width of the band; 0 leaves the router as it was.
        units: what its selection scores, and so ε, are: logits, softmax, sigmoid or sqrtsoftplus.
    """

    name: str
    family: str
    k: int
    n_experts: int
    k_max: int
    epsilon: float
    units: str

    @property
    def smoothed(self) -> bool:
        """Whether the router chooses otherwise than it did."""
        return self.epsilon > 0 and self.k < self.n_experts


@dataclass(frozen=True)
class Smoothing:
    """How a model is smoothed.

    Attributes:
        layers: its routers in order, those with ε = 0 included.
        refused: routers that cannot be smoothed, by name, with the reason.
        a: exponent at the lower end of the ramp.
        b: exponent at its upper end.
        how: how ε was chosen, in words.
        detach_ramp: whether no gradient goes through the shares.
    """

    layers: tuple[LayerSmoothing, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    a: float = 1.0
    b: float = 1.0
    how: str = "given"
    detach_ramp: bool = True
    _model: "weakref.ref[nn.Module] | None" = field(default=None, repr=False, compare=False)

    @property
    def epsilons(self) -> dict[str, float]:
        """ε by router name."""
        return {layer.name: layer.epsilon for layer in self.layers}

    def undo(self) -> None:
        """Make the model what it was before."""
        from tieline.hf.smooth_state import remove_smoothing

        model = None if self._model is None else self._model()
        require(model is not None, "the model of this record is gone: nothing to undo")
        assert model is not None
        remove_smoothing(model)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, read again by `read_smoothing`."""
        layers = [dict(vars(layer)) for layer in self.layers]
        ramp = {"a": self.a, "b": self.b, "detach_ramp": self.detach_ramp}
        facts = {"version": VERSION, "how": self.how, "refused": dict(self.refused)}
        return {**facts, **ramp, "layers": layers}


def read_smoothing(found: Any) -> Smoothing:
    """The record in a configuration, which anybody may have written; refuses a malformed one."""
    try:
        require(found["version"] == VERSION, f"its version is {found['version']!r}")
        rows = found["layers"]
        require(isinstance(rows, list) and len(rows) <= MOST_LAYERS, "its layers are no list")
        refused = {str(name): str(why) for name, why in dict(found["refused"]).items()}
        record = Smoothing(
            tuple(_read_layer(row) for row in rows),
            refused,
            float(found["a"]),
            float(found["b"]),
            str(found["how"]),
            bool(found["detach_ramp"]),
        )
        positive = 0 < record.a < math.inf and 0 < record.b < math.inf
        require(positive, f"its ramp is a={record.a}, b={record.b}")
    except (KeyError, TypeError, ValueError) as problem:
        raise UnsupportedModelError(
            f"the configuration holds a smoothing that cannot be read: {problem}"
        ) from problem
    return record


def _read_layer(row: Any) -> LayerSmoothing:
    words = {name: row[name] for name in ("name", "family", "units")}
    counts = {name: row[name] for name in ("k", "n_experts", "k_max")}
    epsilon = row["epsilon"]
    require(all(isinstance(word, str) for word in words.values()), f"names that are none: {words}")
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in counts.values())
    k, n_experts, k_max = counts["k"], counts["n_experts"], counts["k_max"]
    require(whole and 1 <= k <= k_max <= n_experts <= MOST_EXPERTS, f"counts {counts}")
    number = isinstance(epsilon, float | int) and not isinstance(epsilon, bool)
    require(number and 0 <= epsilon < math.inf, f"epsilon {epsilon!r}")
    return LayerSmoothing(**words, **counts, epsilon=float(epsilon))
