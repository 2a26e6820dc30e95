r"""What serving a model in a low precision does to it, and what to do about it.

`inspect`, `audit`, `smooth` and `diff` all report this quantity and take their advice from
`recommend`, so that one model gets one number and one advice:

    changed     share of tokens that change an expert in at least one layer when the whole model is
                computed in the precision served instead of float32
    kl          KL(P ‖ P') of the predicted next tokens, nats per token
    replayed    the same KL when tokens that would change keep the experts and weights of float32:
                what a replay of the routes leaves
    loss        change of the mean loss, nats per token

Rounding the routers alone is another quantity, usually much smaller: errors of the other layers
reach the scores too, and changes add up over depth.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.analysis.job_settings import SERVED
from tieline.core.ranking import gap
from tieline.core.statistics import NOT_MEASURED, Estimate, mean_limits
from tieline.run.condition import Perturbation
from tieline.trace.record import LayerTrace

HARMLESS = 0.001
"""Nats per token by which a precision may move the predictions or raise the loss and count as
harmless."""

BY_ROUTING = 0.2
"""Share of the KL from which repairing the routing is worth its price."""

LEAST_KL = 1e-14
"""Nats below which a KL is the rounding of its own sum."""

SERVED_METRICS = ("changed", "kl", "loss")
"""Numbers of the precision served that have a name."""

Tolerance = Literal["yes", "no", "unclear"]

Routers = Literal["sound", "equal scores", "all chosen"]
"""Whether routers choose at all: "equal scores" if every expert of a layer has the same score for
every token, "all chosen" if k is the number of experts."""

Action = Literal[
    "nothing", "repair routing", "finer precision", "unknown cause", "mend router", "no ties"
]
"""What to do.

nothing             the predictions move by less than `HARMLESS`
repair routing      they move by more, in part because tokens change experts: replay or smooth
finer precision     they move by more, hardly because of that: repairing the routing helps little
unknown cause       they move by more, and what a replay leaves of it was not measured
mend router         all scores of a router are equal: it is untrained or broken
no ties             every expert is chosen, so that no tie is possible
"""


@dataclass(frozen=True)
class Serving:
    """What serving a model in a precision does to it.

    Attributes:
        precision: a name in `SERVED`.
        changed: share of tokens that change an expert in at least one layer.
        kl: KL to the model in float32, nats per token.
        replayed: the same KL with the experts and weights of float32 replayed.
        loss: change of the loss, nats per token.
        tokens: tokens that were run.
        sequences: sequences that they are in, the clusters of the standard errors.
        layers: routed layers of the model.
        replay_bytes: bytes per token that a replay of experts sends.
        routers: whether the routers choose at all.
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
        """Named numbers: "changed@model bf16", "kl@model bf16" and "loss@model bf16"."""
        name = served_rounding(self.precision).name
        values = {f"{kind}@{name}": getattr(self, kind).value for kind in SERVED_METRICS}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def by_routing(self) -> float | None:
        """Share of the KL that goes away with the changed experts; None where it is unknown."""
        return share_gone(self.kl, self.replayed)


@dataclass(frozen=True)
class Recommendation:
    """What to do, as data; `report.words.served_precision` writes the sentence.

    Attributes:
        action: what to do, by the estimates.
        is_sure: whether their intervals allow no other action.
        limit: nats per token below which a cost counts as harmless.
    """

    action: Action
    is_sure: bool = True
    limit: float = HARMLESS


def served_rounding(precision: str) -> Perturbation:
    """Return the perturbation that emulates a precision in the whole model."""
    return Perturbation("rounding", SERVED[precision], "model")


def replay_bytes(layer: LayerTrace, weights: bool = True) -> int:
    """Bytes per token that a replay of a layer sends: k numbers of experts, and their weights."""
    number = 1 if layer.facts.n_experts <= 256 else 2
    return layer.facts.k * (number + (4 if weights else 0))


def router_state(layers: Iterable[LayerTrace]) -> Routers:
    """Return whether routers choose at all, by some of their routing."""
    traces = list(layers)
    if any(has_equal_scores(layer) for layer in traces):
        return "equal scores"
    chosen = [layer.facts.k == layer.facts.n_experts for layer in traces]
    return "all chosen" if chosen and all(chosen) else "sound"


def equal_layers(layers: Iterable[LayerTrace]) -> tuple[str, ...]:
    """Return the names of the routers whose scores are all equal."""
    return tuple(layer.name for layer in layers if has_equal_scores(layer))


def has_equal_scores(layer: LayerTrace) -> bool:
    """Whether a layer has a choice and gives all recorded experts of every token one score."""
    scores, facts = layer.scores, layer.facts
    if scores is None or scores.shape[1] <= facts.k or not len(scores):
        return False
    return bool(torch.equal(scores, scores[:, :1].expand_as(scores)))


def exact_ties(layers: Iterable[LayerTrace]) -> float:
    """Return the largest share of a layer's tokens whose last chosen score equals the next one."""
    recorded = [(layer.scores, layer.facts.k) for layer in layers]
    return max((tied_share(scores, k) for scores, k in recorded if scores is not None), default=0.0)


def tied_share(scores: Float[Tensor, "tokens experts"], k: int) -> float:
    """Return the share of tokens whose k-th largest score equals the next; 0 without one."""
    if scores.shape[1] <= k or not len(scores):
        return 0.0
    return (gap(scores, k) == 0).double().mean().item()


def advice_on_routers(layers: Iterable[LayerTrace]) -> Recommendation | None:
    """Return what to do about routers that do not choose; None for those that do."""
    actions: dict[Routers, Action] = {"equal scores": "mend router", "all chosen": "no ties"}
    action = actions.get(router_state(layers))
    return None if action is None else Recommendation(action)


def recommend(serving: Serving) -> Recommendation:
    """Decide what to do about a model that is served in a low precision."""
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
    low, high = _limits_by_routing(serving)
    action: Action = "repair routing" if serving.by_routing >= BY_ROUTING else "finer precision"
    is_sure = tolerance == "no" and not low < BY_ROUTING <= high
    return Recommendation(action, is_sure)


def _limits_by_routing(serving: Serving) -> tuple[float, float]:
    """95 % limits of the share of the KL by changed experts, as if its parts were independent."""
    share, kl = serving.by_routing, serving.kl
    if share is None or not kl.value:
        return 1.0, 1.0
    errors = (kl.standard_error or 0.0), (serving.replayed.standard_error or 0.0)
    error = math.hypot((1 - share) * errors[0], errors[1]) / kl.value
    return share - 2 * error, share + 2 * error


def tolerated(kl: Estimate, loss: Estimate, sequences: int) -> Tolerance:
    """Whether a precision is harmless, as far as intervals can tell.

    It is if the KL is below `HARMLESS`, and it is not if the KL or the rise of the loss is above.
    The loss does not decide that a precision is harmless: its interval is wider by far, and if the
    model predicts the text as well as itself its mean rise is the KL.

    Args:
        kl: KL to the clean run, clustered by sequence.
        loss: change of the loss, likewise.
        sequences: clusters of their standard errors.
    """
    low, high = mean_limits(kl, sequences, positive=True)
    if low >= HARMLESS or mean_limits(loss, sequences)[0] >= HARMLESS:
        return "no"
    return "yes" if high < HARMLESS else "unclear"


def share_gone(kl: Estimate, remaining: Estimate) -> float | None:
    """Return 1 - left / KL; None where one is missing or the KL is rounding."""
    if kl.value is None or remaining.value is None or kl.value < LEAST_KL:
        return None
    return 1 - remaining.value / kl.value
