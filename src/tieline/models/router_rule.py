"""The rule of a family on the logits z of one call: scores that decide, weights that combine.

Selection scores are the numbers that a router ranks,

    z + bias                       logits
    softmax(z) + bias              softmax
    sigmoid(z) + bias              sigmoid
    sqrt(softplus(z)) + bias       sqrtsoftplus

evaluated in the router's own precision, so that equal numbers tie here if and only if they tie
there; logits stand for their softmax, and tie where that underflows. Experts outside the chosen
groups get the router's fill value (minus infinity or zero).

Combine weights of experts i with shares s_i in [0, 1] (1 for a chosen expert) are

    softmax, not renormalised   w_i = p_i s_i
    softmax, renormalised       w_i = e^{z_i} s_i / Σ_j e^{z_j} s_j      "of chosen" is the same
    with a smallest sum         w_i = p_i s_i / max(Σ_j p_j s_j, least)
    with a norm of order p      w_i = p_i s_i / ‖p s‖_p
    sigmoid, activation         w_i = f(z_i) s_i, over Σ_j f(z_j) s_j + offset where renormalised

times the family's scale, a number or one per expert.
"""

import inspect
import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError
from tieline.core.ranking import group_scores, ranked_choice, stable_topk, topk_mask
from tieline.models.class_changes import Call
from tieline.models.families import Combine, GroupRule, RouterFamily
from tieline.models.router_output_layouts import Choice, entry_of, with_entries
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


def selection_scores(
    family: RouterFamily,
    router: nn.Module,
    logits: Float[Tensor, "tokens experts"],
    call: Call,
) -> Selection:
    """Return the selection scores of one call of `router`, which returned these `logits`."""
    limit = group_limit(family.groups, router)
    scores, units = _ranked_values(family, router, logits, limit is not None)
    rounding = torch.finfo(scores.dtype).eps
    bias = _correction_bias(family, router, call)
    return Selection(scores if bias is None else scores + bias, units, bias, rounding, limit)


def group_limit(groups: GroupRule | None, router: nn.Module) -> GroupLimit | None:
    """Return the groups that limit this router's choice; None if nothing limits it."""
    if groups is None:
        return None
    if groups.when is not None and attrgetter(groups.when[0])(router) != groups.when[1]:
        return None
    count, chosen = (attrgetter(path)(router) for path in (groups.count, groups.chosen))
    if count is None or chosen is None or chosen >= count:
        return None
    return GroupLimit(int(count), int(chosen), groups.score, groups.fill)


def score_units(family: RouterFamily, router: nn.Module, grouped: bool) -> Units:
    """Return the units in which a router ranks, with or without groups in force."""
    ranked = family.ranked
    if grouped and family.groups is not None and family.groups.ranked is not None:
        ranked = family.groups.ranked
    if ranked != "activation":
        return ranked
    name = type(attrgetter(family.activation or "")(router)).__name__
    if name not in _UNITS_OF_ACTIVATION:
        raise UnsupportedModelError(
            f"family {family.name!r} scores by {name}, not by one of {sorted(_UNITS_OF_ACTIVATION)}"
        )
    return _UNITS_OF_ACTIVATION[name]


def _ranked_values(
    family: RouterFamily, router: nn.Module, logits: Tensor, grouped: bool
) -> tuple[Tensor, Units]:
    """The ranked numbers before the bias is added, and their units."""
    units = score_units(family, router, grouped)
    logits = logits_up_to_shift(family, logits if family.own_dtype else at_least_float32(logits))
    if family.activation is not None:
        return attrgetter(family.activation)(router)(logits), units
    if units == "softmax":
        return logits.softmax(dim=-1), units
    if units == "logits" and combine_rule(family, router) == "softmax":
        return without_underflow(logits), units
    return (logits.sigmoid() if units == "sigmoid" else logits), units


def without_underflow(
    logits: Float[Tensor, "tokens experts"],
) -> Float[Tensor, "tokens experts"]:
    """Return logits, those whose softmax is no normal number of float32 raised to one floor.

    Routers rank the probabilities themselves: experts of probability 0 tie, and which of them are
    chosen is an accident. Logits that are not finite stay as they are, and are refused elsewhere.
    """
    least = math.log(torch.finfo(torch.float32).tiny * logits.shape[-1])
    if logits.device.type == "cpu" and logits.numel():  # one look at all of them is nearly free
        low, high = logits.aminmax()
        if low.item() >= high.item() + least:
            return logits
    floor = logits.amax(dim=-1, keepdim=True) + least
    floor = floor.where(floor.isfinite(), -torch.inf)
    return torch.where(logits == -torch.inf, logits, logits.maximum(floor))


def _correction_bias(family: RouterFamily, router: nn.Module, call: Call) -> Tensor | None:
    """The correction bias (E,) that this call used."""
    if family.bias_flag is not None and not attrgetter(family.bias_flag)(router):
        return None
    bias = None if family.bias is None else attrgetter(family.bias)(router)
    if family.bias_argument is not None:
        bound = inspect.signature(router.forward).bind(*call[0], **call[1])
        bias = bound.arguments.get(family.bias_argument)
    return None if bias is None else bias.detach().flatten()


def restrict_to_groups(
    scores: Float[Tensor, "tokens experts"], ids: Int[Tensor, "tokens k"], limit: GroupLimit
) -> tuple[Float[Tensor, "tokens experts"], Float[Tensor, " tokens"]]:
    """Return scores with the fill value outside the chosen groups, and the gap between groups.

    The gap is the score of the last chosen group minus that of the first one left out, in float64.
    Where groups tie, the router chose those that hold the chosen experts `ids`, and then those
    whose best expert is not above all of these.
    """
    size = scores.shape[-1] // limit.n_groups
    of_groups = group_scores(scores, limit.n_groups, limit.score).double()
    untied = _without_contradicted_ties(of_groups, scores, ids, limit)
    ranks = ranked_choice(untied, ids // size, limit.k_groups, limit.k_groups + 1).indices
    in_groups = torch.zeros_like(of_groups, dtype=torch.bool)
    in_groups.scatter_(1, ranks[:, : limit.k_groups], True)
    excluded = ~in_groups.repeat_interleave(size, dim=1)
    values = of_groups.gather(1, ranks)
    return scores.masked_fill(excluded, limit.fill), values[:, -2] - values[:, -1]


def _without_contradicted_ties(
    of_groups: Float[Tensor, "tokens groups"],
    scores: Float[Tensor, "tokens experts"],
    ids: Int[Tensor, "tokens k"],
    limit: GroupLimit,
) -> Float[Tensor, "tokens groups"]:
    """Lower the groups that tie for the last place and whose best expert beats a chosen one.

    Had the router taken such a group, it would have chosen that expert.
    """
    if not ids.shape[1]:
        return of_groups
    best = group_scores(scores, limit.n_groups, "max")
    last = of_groups.topk(limit.k_groups, dim=1).values[:, -1:]
    beats_chosen = best > scores.gather(1, ids).amin(dim=1, keepdim=True)
    lowered = torch.nextafter(of_groups, torch.full_like(of_groups, -torch.inf))
    return torch.where((of_groups == last) & beats_chosen, lowered, of_groups)


def at_least_float32(scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Convert numbers of less than 32 bits to float32, which is exact."""
    return scores.float() if scores.dtype.itemsize < 4 else scores


def logits_up_to_shift(
    family: RouterFamily, returned: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return logits up to a shift: the logarithm where the family returns probabilities.

    A probability that underflowed stays last, but finite.
    """
    if not family.probabilities:
        return returned
    return returned.clamp(min=torch.finfo(returned.dtype).tiny).log()


def family_choice(
    family: RouterFamily,
    router: nn.Module,
    logits: Float[Tensor, "tokens experts"],
    call: Call,
    k: int,
) -> Choice:
    """Return the weights and experts that the family's rule gives for these logits."""
    selection = selection_scores(family, router, logits, call)
    ranked, limit = at_least_float32(selection.scores).detach(), selection.limit
    if limit is not None:
        chosen_groups = topk_mask(group_scores(ranked, limit.n_groups, limit.score), limit.k_groups)
        in_groups = chosen_groups.repeat_interleave(ranked.shape[1] // limit.n_groups, dim=1)
        ranked = ranked.masked_fill(~in_groups, limit.fill)
    ids = stable_topk(ranked, k).indices
    share = torch.ones(ids.shape, dtype=ranked.dtype, device=ranked.device)
    return Choice(column_weights(family, router, logits, ids, share), ids)


def column_weights(
    family: RouterFamily,
    router: nn.Module,
    logits: Float[Tensor, "tokens experts"],
    ids: Int[Tensor, "tokens columns"],
    share: Float[Tensor, "tokens columns"],
) -> Float[Tensor, "tokens columns"]:
    """Return the combine weights of the experts `ids` by the family's rule; 0 for a share of 0.

    Weights that the family divides by a sum with shared experts are not yet divided: see
    `weights_and_output`.

    Args:
        family: the record of the router's family.
        router: the router, for its settings.
        logits: what it returned, or probabilities where the family returns those.
        ids: experts of each token.
        share: the share of each expert.
    """
    logits = logits_up_to_shift(family, at_least_float32(logits))
    weights = _unscaled_weights(family, router, logits, ids, share.to(logits))
    scale = family_scale(family, router)
    if scale is None:
        return weights
    if isinstance(scale, Tensor) and scale.numel() > 1:
        return weights * scale.to(weights)[ids]
    return weights * scale


def weights_and_output(
    family: RouterFamily,
    router: nn.Module,
    logits: Float[Tensor, "tokens experts"],
    output: Any,
    choice: Choice,
    rows: Int[Tensor, " rows"] | None = None,
) -> tuple[Float[Tensor, "rows columns"], Any]:
    """Return the combine weights of another choice, and the output that fits them.

    Where the family divides chosen and shared experts by one sum, the weights of the shared experts
    change by the same factor.

    Args:
        family: the record of the router's family.
        router: the router.
        logits: what it returned.
        output: the output that they are from.
        choice: shares in [0, 1] as weights, and experts; of `rows` alone if given.
        rows: tokens whose choice changes; None for all.
    """
    row_logits = logits if rows is None else logits[rows]
    masses = column_weights(family, router, row_logits, choice.ids, choice.weights)
    entry = family.shared_weights
    if entry is None:
        return masses, output
    live = family.layout.choice(output, family.chosen_count(router))
    live = live if rows is None else Choice(live.weights[rows], live.ids[rows])
    live_masses = column_weights(
        family, router, row_logits, live.ids, torch.ones_like(live.weights)
    )
    live_sum, new_sum = live_masses.sum(dim=-1, keepdim=True), masses.sum(dim=-1, keepdim=True)
    divisor = live_sum / live.weights.sum(dim=-1, keepdim=True).to(live_sum)  # Σ chosen + Σ shared
    scale = family_scale(family, router)
    new_divisor = divisor + (new_sum - live_sum if scale is None else (new_sum - live_sum) / scale)
    shared = entry_of(output, entry)
    new_shared = (shared if rows is None else shared[rows]) * (divisor / new_divisor).to(shared)
    if rows is not None:
        new_shared = shared.index_copy(0, rows, new_shared)
    return masses / new_divisor, with_entries(output, {entry: new_shared})


def family_scale(family: RouterFamily, router: nn.Module) -> Any:
    """Return the factor of the weights: a number, a number per expert, or None."""
    if family.scale is None:
        return None
    read = attrgetter(family.scale) if isinstance(family.scale, str) else family.scale
    return read(router)


def combine_rule(family: RouterFamily, router: nn.Module) -> Combine:
    """Return how a weight follows from a logit, by the settings of the router where they decide."""
    combine = family.combine
    return combine(router) if callable(combine) else combine


def renormalises_weights(family: RouterFamily, router: nn.Module) -> bool:
    """Whether the chosen weights are divided by their sum or norm before they are scaled."""
    if family.norm_order is not None:
        return attrgetter(family.norm_order)(router) is not None
    if combine_rule(family, router) == "softmax of chosen":
        return True
    if family.renormalise in ("always", "never"):
        return family.renormalise == "always"
    return bool(attrgetter(family.renormalise)(router))


def _unscaled_weights(
    family: RouterFamily, router: nn.Module, logits: Tensor, ids: Tensor, share: Tensor
) -> Tensor:
    """Combine weights (T, columns) before the scale of the family."""
    combine, chosen = combine_rule(family, router), logits.gather(1, ids)
    divided = renormalises_weights(family, router) and family.shared_weights is None
    if not combine.startswith("softmax"):
        activation = torch.sigmoid
        if combine == "activation":
            activation = attrgetter(family.activation or "")(router)
        mass = activation(chosen) * share
        return mass / (mass.sum(dim=-1, keepdim=True) + family.sum_offset) if divided else mass
    if divided and family.least_sum is None and family.norm_order is None:
        # relative to the largest in use, so that no sum is empty
        mass = chosen.masked_fill(share == 0, -torch.inf).softmax(dim=-1) * share
        return mass / mass.sum(dim=-1, keepdim=True)
    # less the largest logit first: the logarithm of the sum is rounded by the size of the logits
    mass = logits.log_softmax(dim=-1).gather(1, ids).exp() * share
    if not divided:
        return mass
    if family.norm_order is not None:
        order = attrgetter(family.norm_order)(router)
        return mass / torch.linalg.vector_norm(mass, ord=order, dim=-1, keepdim=True)
    least = attrgetter(family.least_sum or "")(router)
    return mass / mass.sum(dim=-1, keepdim=True).clamp(min=least)
