"""What softening the choice of a model does to its loss, as frozen records."""

from dataclasses import dataclass
from typing import ClassVar

from tieline.core.records import Result
from tieline.core.statistics import Estimate
from tieline.measure.boundary import MarginTail


@dataclass(frozen=True)
class SoftLevel:
    """The loss at one width.

    Attributes:
        width: τ for k = 1, ε for k > 1; for all layers together the factor of their first widths.
        change: loss of the softened model minus that of the hard one, in nats per token.
        slope: the change over the width.
        missed: predicted slope minus this one, with the standard error of the paired difference;
            None where nothing is predicted.
        expected: the slope that first and second order give for the tokens of this very sample at
            this width; None where other tokens than the near ones matter.
        ratio: measured change over the one so expected, with the error of the paired difference.
    """

    width: float
    change: Estimate
    slope: Estimate
    missed: Estimate | None = None
    expected: Estimate | None = None
    ratio: Estimate | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the prediction is within 15 % or three standard errors; None without one."""
        if self.missed is None or self.missed.value is None or self.slope.value is None:
            return None
        allowed = max(0.15 * abs(self.slope.value), 3 * (self.missed.standard_error or 0.0))
        return abs(self.missed.value) <= allowed


@dataclass(frozen=True)
class DecidingToken:
    """A token at a wall and its part of the predicted slope.

    Attributes:
        document: its document.
        position: its position there.
        text: its text.
        layer: name of the router.
        leaving: the expert of rank k.
        entering: the expert of rank k + 1.
        gap: its gap.
        effect: change of the summed loss of its sequence, averaged over the width, in nats:
            negative where softening helps.
    """

    document: int
    position: int
    text: str
    layer: str
    leaving: int
    entering: int
    gap: float
    effect: float


@dataclass(frozen=True)
class SoftLayer:
    """One router softened alone.

    Attributes:
        name: name of the router.
        form: "softmax" at a temperature, or "projection" with a band.
        levels: measured losses, the smallest width first.
        predicted: slope of the loss at width 0, from the tokens at the walls.
        density: density of the gap at zero.
        tail: margin tail P(gap <= t) ~ C t^α (Paper 0, eq. 4.4).
        by_gradient: part of `predicted` that is linear in the jump: density × jump × gradient of
            the loss.
        constant: C_sh with |change| <= C_sh width^α (Theorem 4.5), from the largest gradient and
            jump seen; None where the tail is not known.
        near: tokens at the walls that carry the prediction.
        exact: those whose loss was computed again with a part of the jump.
        deciding: tokens with the largest parts of the slope, largest first.
        half: number of tokens that carry half of the sum of the sizes of all parts.
        status: "ok", or why nothing is predicted.
    """

    name: str
    form: str
    levels: tuple[SoftLevel, ...]
    predicted: Estimate
    density: Estimate
    tail: MarginTail
    by_gradient: float | None = None
    constant: float | None = None
    near: int = 0
    exact: int = 0
    deciding: tuple[DecidingToken, ...] = ()
    half: int = 0
    status: str = "ok"


@dataclass(frozen=True, repr=False)
class Softening(Result):
    """Loss against the width of the soft choice, layer by layer and for all layers at once.

    Attributes:
        model: name of the model.
        layers: one record per router.
        together: all routers at once, widths in units of their first ones.
        predicted: sum of the predicted slopes times those first widths.
        loss: of the hard model, in nats per token.
        tokens: tokens of the sample.
        sequences: its sequences.
        cost: what all of this cost, in forward passes over 16,384 tokens, estimated.
        rounded_formats: formats of fewer bits than float32 that the model has weights in.
        provenance: text, tokens, batch size and seed.
    """

    format: ClassVar[str] = "tieline-softening"

    model: str
    layers: tuple[SoftLayer, ...]
    together: tuple[SoftLevel, ...]
    predicted: Estimate
    loss: Estimate
    tokens: int
    sequences: int
    cost: float
    rounded_formats: tuple[str, ...]
    provenance: dict[str, object]

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers of all layers together: "loss", "predicted", and "change@F" at F widths."""
        named = {"loss": self.loss, "predicted": self.predicted}
        named |= {f"change@{level.width:g}": level.change for level in self.together}
        return {name: x.value for name, x in named.items() if x.value is not None}
