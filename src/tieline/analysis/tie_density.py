"""How many tokens a step of training will have at ties, from a trace taken before it.

    within      P(Δ <= q): tokens within one spacing of the threshold            Def. 2.1, 7.1
    tie         mean (1 - Δ/q)+: expected ties of these tokens                   Def. 7.2
    population  f_gap(0) q / 2: the same for the population, which sees ties of fine formats that
                a small sample has none of                                       Def. 7.2
    exact       gaps that are zero in the trace itself

q is the spacing of the format at the logit of rank k. Tokens at ties are those that recomputation,
another kernel or another batch may route otherwise: the verdicts of `recompute_check`.
"""

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.analysis.monitor import RoutingWarning
from tieline.core.errors import ParameterError
from tieline.core.numerics import PRECISIONS, float_step, grid_step
from tieline.core.records import to_plain
from tieline.core.statistics import Estimate, mean_estimate
from tieline.measure.boundary import boundary_mass, gap_density
from tieline.measure.flips import first_order
from tieline.measure.logit_view import logit_view
from tieline.measure.measures import check_finite_scores, gap_status
from tieline.measure.rounding import shared_cell
from tieline.trace.record import LayerTrace, RoutingTrace

FORMATS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
TINY = 1e-300
UNKNOWN_SIZE = "not answerable: softmax scores do not tell the size of the logits that are rounded"


@dataclass(frozen=True)
class LayerTies:
    """Ties of one layer.

    Attributes:
        name: the router.
        status: "ok", or why the layer cannot answer; then everything else is None.
        spacing: mean q, in units of the logits.
        within: share of tokens within q of a tie, and its 95 % band (`low`, `high`).
        tie: expected share of ties of these tokens.
        population: expected share in the population.
        exact: tokens of the trace that tie exactly.
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
    """Ties to expect per token when the router's logits have a format.

    Attributes:
        precision: name of the format.
        layers: one record per layer.
        per_token: expected ties of a token, over all layers: the population's rate where it is
            known, else that of the tokens of the trace.
        tokens: tokens of the trace.
        message: what to do about it; None below the limit.
    """

    precision: str
    layers: tuple[LayerTies, ...]
    per_token: float
    tokens: int
    message: str | None

    def expected(self, tokens: int) -> float:
        """Expected ties in a step of `tokens` tokens."""
        return self.per_token * tokens

    def to_dict(self) -> dict[str, object]:
        """JSON values."""
        return to_plain(self)


def tie_density(
    trace: RoutingTrace, dtype: torch.dtype | str, *, warn_above: float = 1e-3
) -> TieDensity:
    """Ties to expect per token when logits are held in `dtype`; a `RoutingWarning` if many.

    Args:
        trace: routing of some text by the model that will be trained, from `capture`.
        dtype: a floating-point type, or its name: "fp32" or one of `PRECISIONS`.
        warn_above: expected ties per token, over all layers, from which it warns.
    """
    name = _format_name(dtype)
    layers = tuple(_layer_ties(layer, name) for layer in trace.layers)
    per_token = sum(_tie_rate(layer) for layer in layers)
    message = _tie_warning(name, per_token) if per_token > warn_above else None
    if message is not None:
        warnings.warn(message, RoutingWarning, stacklevel=2)
    return TieDensity(name, layers, per_token, trace.n_tokens, message)


def _layer_ties(layer: LayerTrace, precision: str) -> LayerTies:
    """Expected ties of one layer in a number format."""
    check_finite_scores(layer)
    status = gap_status(layer)
    view = logit_view(layer) if status == "ok" else None
    if view is None or view.logits is None:
        return LayerTies(layer.name, UNKNOWN_SIZE if status == "ok" else status)
    at = layer.facts.k - 1
    step = _logit_spacing(view.logits, precision)[:, at]
    reach = (step * view.slope[:, at]).clamp(min=TINY)
    gaps = view.scores[:, at] - view.scores[:, at + 1]
    mass = boundary_mass(gaps / reach, torch.ones(1, dtype=torch.float64))
    return LayerTies(
        name=layer.name,
        status="ok",
        spacing=step.mean().item(),
        within=mass.mass[0],
        low=mass.low[0],
        high=mass.high[0],
        tie=mean_estimate(shared_cell(gaps, reach)),
        population=first_order(gap_density(gaps / reach).times(0.5)),
        exact=int((layer.gap == 0).sum()),
    )


def _tie_rate(layer: LayerTies) -> float:
    """Ties per token: the population's rate where it is known, else the sample's."""
    for estimate in (layer.population, layer.tie):
        if estimate is not None and estimate.value is not None and estimate.status == "ok":
            return max(0.0, estimate.value)
    return 0.0


def _logit_spacing(
    logits: Float[Tensor, "tokens ranks"], precision: str
) -> Float[Tensor, "tokens ranks"]:
    """Spacing q of a format at each logit."""
    if precision == "fp32":
        return float_step(logits.nan_to_num(neginf=0.0), 23, -126)
    return grid_step(logits, precision)


def _format_name(dtype: torch.dtype | str) -> str:
    """Name of a number format; refuses unknown ones."""
    formats = ("fp32", *PRECISIONS)
    name = FORMATS.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name is None or name not in formats:
        raise ParameterError(f"unknown dtype {dtype!r}: one of {', '.join(formats)}")
    return name


def _tie_warning(precision: str, per_token: float) -> str:
    """Say how many ties a token meets, and the remedy."""
    remedy = "keep the router's logits in fp32" if precision != "fp32" else "smooth the choice"
    return (
        f"with logits in {precision} a token meets {per_token:.2g} ties on average: recomputation "
        f"and other kernels may route it otherwise; {remedy}"
    )
