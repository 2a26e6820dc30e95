"""Selection scores: the numbers that a router ranks, from the logits that it returned.

    z + bias                       logits
    softmax(z) + bias              softmax
    sigmoid(z) + bias              sigmoid
    sqrt(softplus(z)) + bias       sqrtsoftplus

evaluated in the router's own precision, so that equal numbers tie here if and only if they tie
there. Experts outside the chosen groups get the router's fill value (minus infinity or zero).
"""

import inspect
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError
from tieline.core.ranking import group_scores, ranked_choice
from tieline.models.changes import Call
from tieline.models.families import Groups, RouterFamily
from tieline.trace.record import Units

_UNITS_OF_ACTIVATION: dict[str, Units] = {
    "Sigmoid": "sigmoid",
    "SqrtSoftplusActivation": "sqrtsoftplus",
}


@dataclass(frozen=True)
class GroupLimit:
    """The groups of one router: their number, how many are chosen, and how they are scored."""

    n_groups: int
    k_groups: int
    score: Literal["max", "top2sum"]
    fill: float


@dataclass(frozen=True)
class Selection:
    """The scores that one call of a router ranked.

    Attributes:
        scores: selection scores of all experts, in the router's dtype.
        units: what the scores are.
        bias: correction bias that the scores contain.
        rounding: unit roundoff of the precision in which the router ranked.
        limit: groups that limit the choice.
    """

    scores: Float[Tensor, "tokens experts"]
    units: Units
    bias: Float[Tensor, " experts"] | None
    rounding: float
    limit: GroupLimit | None


def select(
    family: RouterFamily,
    router: nn.Module,
    logits: Float[Tensor, "tokens experts"],
    call: Call,
) -> Selection:
    """Return the selection scores of one call of `router`, which returned these `logits`."""
    limit = group_limit(family.groups, router)
    scores, units = _activate(family, router, logits, limit is not None)
    rounding = torch.finfo(scores.dtype).eps
    bias = _bias(family, router, call)
    return Selection(scores if bias is None else scores + bias, units, bias, rounding, limit)


def group_limit(groups: Groups | None, router: nn.Module) -> GroupLimit | None:
    """Return the groups that limit this router's choice; None if nothing limits it."""
    if groups is None:
        return None
    if groups.when is not None and attrgetter(groups.when[0])(router) != groups.when[1]:
        return None
    count, chosen = (attrgetter(path)(router) for path in (groups.count, groups.chosen))
    if count is None or chosen is None or chosen >= count:
        return None
    return GroupLimit(int(count), int(chosen), groups.score, groups.fill)


def units_of(family: RouterFamily, router: nn.Module, grouped: bool) -> Units:
    """Return the units in which a router ranks, with or without groups in force."""
    ranked = family.ranked
    if grouped and family.groups is not None and family.groups.ranked is not None:
        ranked = family.groups.ranked
    if ranked != "activation":
        return ranked
    name = type(attrgetter(family.activation or "")(router)).__name__
    if name not in _UNITS_OF_ACTIVATION:
        known = sorted(_UNITS_OF_ACTIVATION)
        raise UnsupportedModelError(
            f"family {family.name!r} scores by {name}, not by one of {known}"
        )
    return _UNITS_OF_ACTIVATION[name]


def _activate(
    family: RouterFamily, router: nn.Module, logits: Tensor, grouped: bool
) -> tuple[Tensor, Units]:
    """The ranked numbers before the bias is added, and their units."""
    units = units_of(family, router, grouped)
    logits = logits if family.own_dtype else at_least_single(logits)
    if family.probabilities:  # a probability that underflowed stays last, but finite
        logits = logits.clamp(min=torch.finfo(logits.dtype).tiny).log()
    if family.activation is not None:
        return attrgetter(family.activation)(router)(logits), units
    if units == "softmax":
        return logits.softmax(dim=-1), units
    return (logits.sigmoid() if units == "sigmoid" else logits), units


def _bias(family: RouterFamily, router: nn.Module, call: Call) -> Tensor | None:
    """The correction bias (E,) that this call used."""
    if family.bias_flag is not None and not attrgetter(family.bias_flag)(router):
        return None
    bias = None
    if family.bias is not None:
        bias = attrgetter(family.bias)(router)
    if family.bias_argument is not None:
        bound = inspect.signature(router.forward).bind(*call[0], **call[1])
        bias = bound.arguments.get(family.bias_argument)
    return None if bias is None else bias.detach().flatten()


def restrict(
    scores: Float[Tensor, "tokens experts"], ids: Int[Tensor, "tokens k"], limit: GroupLimit
) -> tuple[Float[Tensor, "tokens experts"], Float[Tensor, " tokens"]]:
    """Return scores with the fill value outside the chosen groups, and the gap between groups.

    The gap is the score of the last chosen group minus that of the first one left out, in float64.
    Where groups tie, the router chose those that hold the chosen experts `ids`.
    """
    size = scores.shape[-1] // limit.n_groups
    of_groups = group_scores(scores, limit.n_groups, limit.score)
    ranked = ranked_choice(of_groups, ids // size, limit.k_groups, limit.k_groups + 1)
    inside = torch.zeros_like(of_groups, dtype=torch.bool)
    inside.scatter_(1, ranked.indices[:, : limit.k_groups], True)
    outside = ~inside.repeat_interleave(size, dim=1)
    values = ranked.values.double()
    return scores.masked_fill(outside, limit.fill), values[:, -2] - values[:, -1]


def at_least_single(scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Convert numbers of less than 32 bits to float32, which is exact."""
    return scores.float() if scores.dtype.itemsize < 4 else scores
