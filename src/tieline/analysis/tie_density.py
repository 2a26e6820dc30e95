"""Expected number of exact ties per token if a router's logits are stored in a number format.

`tie_density` predicts the ties of a training step from a trace taken before it:

    within      P(Δ <= q): tokens within one spacing of the threshold            Def. 2.1, 7.1
    tie         mean (1 - Δ/q)+: expected ties of these tokens                   Def. 7.2
    population  f_gap(0) q / 2: expected ties in the population, also for formats so fine
                that a small sample has no ties                                  Def. 7.2
    exact       gaps that are zero in the trace itself

q is the spacing of the format at the logit of rank k. Tokens at ties are those that recomputation,
another kernel or another batch may route differently: the verdicts of `recompute_check`.
"""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ParameterError, RoutingWarning
from tieline.core.numerics import PRECISIONS, float_step, grid_step
from tieline.core.records import to_plain
from tieline.core.statistics import Estimate, mean_estimate
from tieline.measure.boundary import MassProfile, boundary_mass, gap_density
from tieline.measure.measures import UNKNOWN_LOGIT_SIZE, gap_status
from tieline.measure.noise_flips import LogitView, logit_view, note_first_order
from tieline.measure.rounding_flips import shared_cell_probability
from tieline.trace.record import LayerTrace, RoutingTrace, check_finite_scores

TINY = 1e-300
FORMAT_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


@dataclass(frozen=True)
class LayerTies:
    """Expected ties of one layer in a number format.

    Attributes:
        name: name of the router.
        status: "ok", or the reason why all other fields are None.
        spacing: mean q, in units of the logits.
        within: share of tokens within q of a tie, with its 95 % band (`low`, `high`).
        tie: expected share of ties of these tokens.
        population: expected share of ties in the population.
        exact: number of tokens of the trace that tie exactly.
    """

    name: str
    status: str
    spacing: float | None = None
    within: float | None = None
    low: float | None = None
    high: float | None = None
    tie: Estimate | None = None
    population: Estimate | None = None
    exact: int | None = None


@dataclass(frozen=True)
class TieDensity:
    """Expected ties per token if the router's logits have a number format.

    Attributes:
        precision: name of the format.
        layers: one record per layer.
        per_token: expected number of ties of a token in all layers: the rate of the population if
            it is known, else that of the tokens of the trace.
        tokens: number of tokens of the trace.
        message: advice if `per_token` exceeds the limit; else None.
    """

    precision: str
    layers: tuple[LayerTies, ...]
    per_token: float
    tokens: int
    message: str | None

    def expected(self, tokens: int) -> float:
        """Return the expected number of ties in a step of `tokens` tokens."""
        return self.per_token * tokens

    def to_dict(self) -> dict[str, object]:
        """Return all fields as JSON values."""
        return to_plain(self)


def tie_density(
    trace: RoutingTrace, dtype: torch.dtype | str, *, warn_above: float = 1e-3
) -> TieDensity:
    """Predict the ties per token if logits are stored in `dtype`; warns if there are many.

    Args:
        trace: routing of some text by the model that will be trained, from `capture`.
        dtype: a floating-point type, or its name: "fp32" or one of `PRECISIONS`.
        warn_above: expected ties per token, in all layers, above which a `RoutingWarning` is
            raised.
    """
    formats = ("fp32", *PRECISIONS)
    name = FORMAT_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name is None or name not in formats:
        raise ParameterError(f"unknown dtype {dtype!r}: one of {', '.join(formats)}")
    layers = tuple(_layer_ties(layer, name) for layer in trace.layers)
    per_token = sum(_tie_rate(layer) for layer in layers)
    message = None
    if per_token > warn_above:
        remedy = "keep the router's logits in fp32" if name != "fp32" else "smooth the choice"
        message = (
            f"with logits in {name} a token meets {per_token:.2g} ties on average: recomputation "
            f"and other kernels may route it otherwise; {remedy}"
        )
        warnings.warn(message, RoutingWarning, stacklevel=2)
    return TieDensity(name, layers, per_token, trace.n_tokens, message)


def _layer_ties(layer: LayerTrace, precision: str) -> LayerTies:
    """Return the expected ties of one layer in a number format."""
    check_finite_scores(layer)
    status = gap_status(layer)
    view = logit_view(layer) if status == "ok" else None
    if view is None or view.logits is None:
        return LayerTies(layer.name, UNKNOWN_LOGIT_SIZE if status == "ok" else status)
    at_threshold = ThresholdSpacing.from_layer(layer, view, precision)
    mass, gaps, spacing = at_threshold.mass(), at_threshold.gaps, at_threshold.in_scores
    return LayerTies(
        name=layer.name,
        status="ok",
        spacing=at_threshold.in_logits.mean().item(),
        within=mass.mass[0],
        low=mass.low[0],
        high=mass.high[0],
        tie=mean_estimate(shared_cell_probability(gaps, spacing)),
        population=note_first_order(gap_density(gaps / spacing).times(0.5)),
        exact=int((layer.gap == 0).sum()),
    )


def _tie_rate(layer: LayerTies) -> float:
    """Return the ties per token: the rate of the population if it is known, else of the sample."""
    for estimate in (layer.population, layer.tie):
        if estimate is not None and estimate.value is not None and estimate.status == "ok":
            return max(0.0, estimate.value)
    return 0.0


class ThresholdSpacing(NamedTuple):
    """Spacing q of a format at each token's threshold, in units of logits and scores, and gaps."""

    in_logits: Float[Tensor, " tokens"]
    in_scores: Float[Tensor, " tokens"]
    gaps: Float[Tensor, " tokens"]

    @classmethod
    def from_layer(cls, layer: LayerTrace, view: LogitView, precision: str) -> "ThresholdSpacing":
        """Compute spacing and gaps of a layer whose logits are known."""
        assert view.logits is not None
        rank = layer.facts.k - 1
        if precision == "fp32":
            steps = float_step(view.logits.nan_to_num(neginf=0.0), 23, -126)
        else:
            steps = grid_step(view.logits, precision)
        in_scores = (steps[:, rank] * view.slope[:, rank]).clamp(min=TINY)
        return cls(steps[:, rank], in_scores, view.scores[:, rank] - view.scores[:, rank + 1])

    def mass(self) -> MassProfile:
        """Return P(Δ <= q), the share of tokens within one spacing of a tie (Def. 2.1)."""
        unit = torch.ones(1, dtype=torch.float64, device=self.gaps.device)
        return boundary_mass(self.gaps / self.in_scores, unit)
