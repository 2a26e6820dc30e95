r"""Effect of serving a model in a low precision, and the recommended action.

`inspect`, `audit`, `smooth` and `diff` all report these numbers and take their advice from
`recommend`, so that one model always gets the same numbers and advice:

    changed     share of tokens that change an expert in at least one layer when the whole model is
                computed in the precision served instead of float32
    kl          KL(P ‖ P') of the predicted next tokens, nats per token
    replayed    KL if tokens that would change keep the experts and weights of float32, as in a
                replay of the routes
    loss        change of the mean loss, nats per token

Rounding the routers alone usually has a much smaller effect, because errors of the other layers
also reach the scores, and changes add up over depth.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tieline.analysis.job_settings import SERVED
from tieline.core.statistics import NOT_MEASURED, Estimate, mean_limits
from tieline.measure.exact_ties import Routers, router_state
from tieline.run.condition import Perturbation
from tieline.trace.record import LayerTrace

HARMLESS = 0.001
"""KL or rise of the loss, in nats per token, below which a precision counts as harmless."""

LEAST_ROUTING_SHARE = 0.2
"""Share of the KL by routing from which repairing the routing is recommended."""

LEAST_KL = 1e-14
"""KL in nats below which it is rounding error of its sum."""

SERVED_METRICS = ("changed", "kl", "loss")
"""Fields of `Serving` that are named metrics."""

Tolerance = Literal["yes", "no", "unclear"]


Action = Literal[
    "nothing", "repair routing", "finer precision", "unknown cause", "mend router", "no ties"
]
"""Recommended action.

nothing             the effect on the predictions is below `HARMLESS`
repair routing      it is above, in part because tokens change experts: replay or smooth
finer precision     it is above, but repairing the routing would remove little of it
unknown cause       it is above, and the remaining effect under replay was not measured
mend router         all scores of a router are equal: it is untrained or broken
no ties             every expert is chosen, so no tie is possible
"""


@dataclass(frozen=True)
class Serving:
    """Effect of serving a model in a precision.

    Attributes:
        precision: a name in `SERVED`.
        changed: share of tokens that change an expert in at least one layer.
        kl: KL to the model in float32, nats per token.
        replayed: KL with the experts and weights of float32 replayed.
        loss: change of the loss, nats per token.
        tokens: number of tokens that were run.
        sequences: number of sequences, the clusters of the standard errors.
        layers: number of routed layers of the model.
        replay_bytes: bytes per token that a replay of experts sends.
        routers: whether the routers choose between experts.
        equal_layers: names of the routers whose scores are all equal.
        exact_ties: largest share of a layer's tokens whose last chosen score equals the next one.
    """

    precision: str
    changed: Estimate
    kl: Estimate
    replayed: Estimate = NOT_MEASURED
    loss: Estimate = NOT_MEASURED
    tokens: int = 0
    sequences: int = 0
    layers: int = 1
    replay_bytes: int = 0
    routers: Routers = "sound"
    equal_layers: tuple[str, ...] = ()
    exact_ties: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Return "changed@model P", "kl@model P" and "loss@model P" for the precision P."""
        name = served_rounding(self.precision).name
        values = {f"{kind}@{name}": getattr(self, kind).value for kind in SERVED_METRICS}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def by_routing(self) -> float | None:
        """Share of the KL that a replay of the experts removes; None if unknown."""
        return removed_share(self.kl, self.replayed)


@dataclass(frozen=True)
class Recommendation:
    """Recommended action as data; `report.words.served_precision` writes the sentence.

    Attributes:
        action: recommended action, by the estimates.
        is_sure: whether the intervals of the estimates allow no other action.
        limit: cost in nats per token below which a precision counts as harmless.
    """

    action: Action
    is_sure: bool = True
    limit: float = HARMLESS


def served_rounding(precision: str) -> Perturbation:
    """Return the perturbation that emulates a precision in the whole model."""
    return Perturbation("rounding", SERVED[precision], "model")


def replay_bytes(layer: LayerTrace, weights: bool = True) -> int:
    """Return the bytes per token that a replay of a layer sends: k expert ids and their weights."""
    id_bytes = 1 if layer.facts.n_experts <= 256 else 2
    return layer.facts.k * (id_bytes + (4 if weights else 0))


def advice_on_routers(layers: Iterable[LayerTrace]) -> Recommendation | None:
    """Return the action for routers that do not choose between experts; None if they do."""
    actions: dict[Routers, Action] = {"equal scores": "mend router", "all chosen": "no ties"}
    action = actions.get(router_state(layers))
    return None if action is None else Recommendation(action)


def recommend(serving: Serving) -> Recommendation:
    """Recommend an action for a model that is served in a low precision."""
    if serving.routers == "equal scores":
        return Recommendation("mend router")
    if serving.routers == "all chosen":
        return Recommendation("no ties")
    tolerance = tolerated(serving.kl, serving.loss, serving.sequences)
    exceeds = tolerance == "no" or (serving.kl.value or 0.0) >= HARMLESS
    if not exceeds:
        return Recommendation("nothing", tolerance == "yes")
    if serving.by_routing is None:
        return Recommendation("unknown cause", is_sure=False)
    low, high = _routing_share_limits(serving)
    repairs = serving.by_routing >= LEAST_ROUTING_SHARE
    action: Action = "repair routing" if repairs else "finer precision"
    is_sure = tolerance == "no" and not low < LEAST_ROUTING_SHARE <= high
    return Recommendation(action, is_sure)


def _routing_share_limits(serving: Serving) -> tuple[float, float]:
    """Return 95 % limits of the share of the KL by routing, as if both KLs were independent."""
    share, kl = serving.by_routing, serving.kl
    if share is None or not kl.value:
        return 1.0, 1.0
    errors = (kl.standard_error or 0.0), (serving.replayed.standard_error or 0.0)
    error = math.hypot((1 - share) * errors[0], errors[1]) / kl.value
    return share - 2 * error, share + 2 * error


def tolerated(kl: Estimate, loss: Estimate, sequences: int) -> Tolerance:
    """Return whether a precision is harmless: "yes", "no", or "unclear" from the intervals.

    "yes" if the KL is below `HARMLESS`, "no" if the KL or the rise of the loss is above. A small
    change of the loss is not required for "yes": its interval is much wider, and if the model
    predicts the text as well as its own output, the mean rise of the loss is the KL.

    Args:
        kl: KL to the clean run, clustered by sequence.
        loss: change of the loss, clustered by sequence.
        sequences: number of clusters of the standard errors.
    """
    low, high = mean_limits(kl, sequences, positive=True)
    if low >= HARMLESS or mean_limits(loss, sequences)[0] >= HARMLESS:
        return "no"
    return "yes" if high < HARMLESS else "unclear"


def removed_share(kl: Estimate, remaining: Estimate) -> float | None:
    """Return 1 - remaining / kl; None if one is missing or the KL is rounding error."""
    if kl.value is None or remaining.value is None or kl.value < LEAST_KL:
        return None
    return 1 - remaining.value / kl.value
