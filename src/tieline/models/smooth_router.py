"""One router whose choice is continuous at ties, in the scoring of its own family.

The router runs as always. Its logits are ranked again, each expert gets a share s in [0, 1] of its
weight, and the output is rewritten with more columns (`hf.router_call.attach`): as many as some
token of the batch needs for the shares of `ProjectedTopK`, k_max for those of `SmoothTopK`.

    softmax, not renormalised   w_i = p_i s_i
    softmax, renormalised       w_i = e^{z_i} s_i / Σ_j e^{z_j} s_j      "of chosen" is the same
    ernie4_5                    w_i = p_i s_i / max(Σ_j p_j s_j, least)
    dbrx                        w_i = p_i s_i / ‖p s‖_p
    sigmoid, activation         w_i = f(z_i) s_i, over Σ_j f(z_j) s_j + tiny where renormalised

times the family's scale, a number or one per expert. With s = 1 on the chosen experts these are the
router's own weights; the first call verifies that before anything is replaced.

    RouterSmoothing    the handler of a smoothed router
    LayerPlan          k, number of experts and units of a router that can be smoothed
    refusal            why the routers of a family cannot be smoothed
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.core.ranking import kth_largest
from tieline.models.capture import ROUNDINGS, check_selected
from tieline.models.changes import Call
from tieline.models.emulate import logits_matrix
from tieline.models.families import HANDLER, RouterFamily, family_of, find_routers
from tieline.models.router_call import SkipRule, choice_in, logits_in, with_choice
from tieline.models.selection import (
    GroupLimit,
    Selection,
    at_least_single,
    group_limit,
    restrict,
    select,
    units_of,
)
from tieline.routing.gates import Groups
from tieline.routing.projected import projected_columns
from tieline.routing.smooth import Columns, smooth_columns

GateName = Literal["projected", "ramp"]
"""The shares of `routing.ProjectedTopK`, or those of `routing.SmoothTopK`."""

TINY = {"lfm2_moe": 1e-6, "muse_spark": 1e-15}
"""Number that a family adds to a sum before dividing by it; 1e-20 in all others."""

LEAST_SUM = {"ernie4_5_moe": "norm_min", "ernie4_5_vl_moe": "norm_min"}
"""Attribute of the smallest sum that a family divides by."""

ORDER_OF_NORM = {"dbrx": "moe_normalize_expert_weights"}
"""Attribute of the order p of the norm that a family divides by; None there means no division."""

Ids = Int[Tensor, "tokens columns"]
Shares = Float[Tensor, "tokens columns"]


def column_weights(
    family: RouterFamily,
    router: nn.Module,
    logits: Float[Tensor, "tokens experts"],
    ids: Ids,
    share: Shares,
) -> Shares:
    """Return the combine weights of the experts `ids` by the family's rule; 0 for a share of 0.

    Args:
        family: the record of the router's family.
        router: the router, for its settings.
        logits: what it returned, or probabilities where the family returns those.
        ids: experts of each token.
        share: the share of each expert.
    """
    logits = at_least_single(logits)
    if family.probabilities:
        logits = logits.clamp(min=torch.finfo(logits.dtype).tiny).log()
    share = share.to(logits)
    mass = _mass(family, router, logits, ids, share)
    scale = family_scale(family, router)
    if scale is None:
        return mass
    if isinstance(scale, Tensor) and scale.numel() > 1:
        return mass * scale.to(mass)[ids]
    return mass * scale


def family_scale(family: RouterFamily, router: nn.Module) -> Any:
    """Return the factor of the weights: a number, a number per expert, or None."""
    if family.name == "openai_privacy_filter":
        return 1 / int(attrgetter(family.k)(router))
    if family.name == "inkling":
        return attrgetter("route_scale")(router) * attrgetter("global_scale")(router)
    return None if family.scale is None else attrgetter(family.scale)(router)


def renormalises(family: RouterFamily, router: nn.Module) -> bool:
    """Whether the chosen weights are divided by their sum before they are scaled."""
    if family.name == "inkling":  # divided with the shared experts in `shared_weights`
        return False
    if family.name in ORDER_OF_NORM:
        return attrgetter(ORDER_OF_NORM[family.name])(router) is not None
    if _score(family, router) == "softmax of chosen":
        return True
    if family.name == "cohere2_moe":
        return bool(attrgetter("norm_topk_prob")(router))
    named = {"always": True, "never": False}
    if family.renormalise in named:
        return named[family.renormalise]
    return bool(attrgetter(family.renormalise)(router))


def _score(family: RouterFamily, router: nn.Module) -> str:
    """How a weight follows from a logit, also for families whose record says "own"."""
    if family.combine != "own":
        return family.combine
    if family.name == "cohere2_moe":
        by = attrgetter("expert_selection_fn")(router)
        return "softmax of chosen" if by == "softmax" else "sigmoid"
    return {"dbrx": "softmax", "inkling": "sigmoid"}.get(family.name, "softmax of chosen")


def _mass(
    family: RouterFamily, router: nn.Module, logits: Tensor, ids: Tensor, share: Tensor
) -> Tensor:
    score, chosen = _score(family, router), logits.gather(1, ids)
    divided = renormalises(family, router)
    if score.startswith("softmax"):
        special = family.name in LEAST_SUM or family.name in ORDER_OF_NORM
        if divided and not special:  # relative to the largest in use, so that no sum is empty
            mass = chosen.masked_fill(share == 0, -torch.inf).softmax(dim=-1) * share
            return mass / mass.sum(dim=-1, keepdim=True)
        mass = (chosen - logits.logsumexp(dim=-1, keepdim=True)).exp() * share
        return mass / _divisor(family, router, mass) if divided else mass
    mass = _activated(family, router, chosen) * share
    if not divided:
        return mass
    return mass / (mass.sum(dim=-1, keepdim=True) + TINY.get(family.name, 1e-20))


def _divisor(family: RouterFamily, router: nn.Module, mass: Tensor) -> Tensor:
    if family.name in LEAST_SUM:
        least = attrgetter(LEAST_SUM[family.name])(router)
        return mass.sum(dim=-1, keepdim=True).clamp(min=least)
    order = attrgetter(ORDER_OF_NORM[family.name])(router)
    return torch.linalg.vector_norm(mass, ord=order, dim=-1, keepdim=True)


def _activated(family: RouterFamily, router: nn.Module, chosen: Tensor) -> Tensor:
    if family.combine == "activation":
        return attrgetter(family.activation or "")(router)(chosen)
    return chosen.sigmoid()


def smoothing_of(router: nn.Module) -> "RouterSmoothing | None":
    """Return how a router is smoothed; None if it is not."""
    handler = getattr(router, HANDLER, None)
    return handler if isinstance(handler, RouterSmoothing) else None


@dataclass
class RouterSmoothing:
    """A continuous choice on one router; an instance is its handler.

    Attributes:
        name: qualified name of the router, for messages.
        family: the record of its family.
        k: experts that are chosen.
        k_max: columns of the output; those of the last one where they follow the batch.
        epsilon: width of the band, in units of the selection scores.
        a: exponent at the lower end of the ramp.
        b: exponent at its upper end.
        detach_ramp: whether no gradient goes through the shares.
        skip: how a slot is left out.
        gate: "projected", with as many columns as the batch needs, or "ramp".
        counting: modules beside the router with an attribute `top_k` that counts columns.
        checked: whether the family's record was verified on the router's own output.
    """

    name: str
    family: RouterFamily
    k: int
    k_max: int
    epsilon: float
    a: float
    b: float
    detach_ramp: bool
    skip: SkipRule
    gate: GateName = "ramp"
    counting: tuple[nn.Module, ...] = ()
    checked: bool = field(default=False, compare=False)

    def __call__(self, router: nn.Module, call: Call, output: Any) -> Any:
        """Return the output with smooth weights."""
        logits = logits_in(self.family.layout, call[0], output)
        selection = select(self.family, router, logits, call)
        if len(logits) and not self.checked:  # nothing is learned from no tokens
            self._check(router, logits, selection, output)
            self.checked = True
        columns = self.columns(selection)
        self.resize(columns.ids.shape[1])
        weights = column_weights(self.family, router, logits, columns.ids, columns.share)
        if self.family.name == "inkling":
            weights, output = shared_weights(self.family, router, output, logits, weights)
        ids = self.skip.applied(columns.ids, columns.share)
        used = columns.share > 0
        layout = self.family.layout
        return with_choice(layout, output, weights, columns.ids, ids=ids, used=used)

    def resize(self, columns: int) -> None:
        """Let everything that counts the columns of an output know their number."""
        self.k_max = columns
        for module in self.counting:
            setattr(module, "top_k", columns)  # noqa: B010 - no attribute that types know

    def columns(self, selection: Selection) -> Columns:
        """Return experts and shares for these selection scores."""
        scores = at_least_single(selection.scores)
        scores = scores.detach() if self.detach_ramp else scores
        groups = gate_groups(selection.limit)
        if self.gate == "projected":
            return projected_columns(scores, self.k, epsilon=self.epsilon, groups=groups)
        return smooth_columns(
            scores,
            self.k,
            epsilon=self.epsilon,
            k_max=self.k_max,
            a=self.a,
            b=self.b,
            groups=groups,
        )

    @torch.no_grad()
    def _check(self, router: nn.Module, logits: Tensor, selection: Selection, output: Any) -> None:
        """Refuse a record that does not give the router's own experts and weights."""
        weights, ids = choice_in(self.family.layout, output, self.k)
        scores = selection.scores
        if selection.limit is not None:
            scores, _ = restrict(scores, ids, selection.limit)
        scores = at_least_single(scores)
        threshold = kth_largest(scores, self.k).squeeze(1)
        chosen = scores.gather(1, ids)
        check_selected(chosen, threshold, selection.rounding, self.name, self.family.name)
        ours = column_weights(self.family, router, logits, ids, torch.ones_like(chosen))
        if self.family.name == "inkling":
            ours = ours / _joint_divisor(ours, weights)
        single = torch.finfo(torch.float32).eps  # in which many compute whatever the model's dtype
        rounding = max(selection.rounding, torch.finfo(weights.dtype).eps, single)
        size = weights.abs().amax(dim=-1, keepdim=True).to(ours)
        if bool(((ours - weights.to(ours)).abs() > ROUNDINGS * rounding * size).any()):
            raise UnsupportedModelError(
                f"layer {self.name!r}: the record of family {self.family.name!r} does not explain "
                f"the weights of {type(router).__name__}, so its choice cannot be smoothed"
            )


def set_widths(model: nn.Module, widths: Mapping[str, float]) -> None:
    """Change ε > 0 of routers that are smoothed already, by name; their record stays as it was."""
    for name, width in widths.items():
        handler = smoothing_of(model.get_submodule(name))
        if handler is not None and width > 0:
            handler.epsilon = width


def gate_groups(limit: GroupLimit | None) -> Groups | None:
    """The groups of a router in the form that gates take."""
    return None if limit is None else Groups(limit.n_groups, limit.k_groups, limit.score)


def _joint_divisor(masses: Tensor, weights: Tensor) -> Tensor:
    """The sum over chosen and shared experts that inkling divides by."""
    return masses.sum(dim=-1, keepdim=True) / weights.sum(dim=-1, keepdim=True).to(masses)


def shared_weights(
    family: RouterFamily, router: nn.Module, output: Any, logits: Tensor, masses: Tensor
) -> tuple[Tensor, tuple[Any, ...]]:
    """Divide by the sum with the shared experts, whose weights change by the same factor."""
    scale = family_scale(family, router)
    own = logits.gather(1, output[2]).sigmoid() * scale
    before = _joint_divisor(own, output[1])  # scale · (Σ chosen + Σ shared) / scale
    divisor = before + (masses.sum(dim=-1, keepdim=True) - own.sum(dim=-1, keepdim=True)) / scale
    shared = output[3] * (before / divisor).to(output[3])
    return masses / divisor, (*output[:3], shared, *output[4:])


EXPERTS = {
    "dbrx": "experts.num_experts",
    "diffusion_gemma": "proj.out_features",
    "gemma4": "proj.out_features",
    "longcat_flash": "n_routed_experts",
}
"""Attribute with the number of ranked experts, if not `num_experts`."""

NOT_SMOOTHED = {
    "phimoe": "the weights of sparsemixer are taken over the experts inside a jitter band of their "
    "own, which jump however the choice is smoothed",
}
"""Families whose choice is known but cannot be replaced, with the reason."""

SKIP_CLASS = "one of its classes skips all experts: which share of a token is skipped has no weight"


@dataclass(frozen=True)
class LayerPlan:
    """A router that can be smoothed.

    Attributes:
        name: its qualified name.
        router: the module.
        family: the record of its family.
        k: experts that it chooses.
        n_experts: experts that it ranks.
        units: what its selection scores are.
    """

    name: str
    router: nn.Module
    family: RouterFamily
    k: int
    n_experts: int
    units: str


def refusal(family: RouterFamily) -> str | None:
    """Return why routers of this family cannot be smoothed; None if they can."""
    if family.refused is not None:
        return family.refused
    if family.skip_class:
        return SKIP_CLASS
    return NOT_SMOOTHED.get(family.name)


def default_k_max(k: int, n_experts: int) -> int:
    """Return k + max(2, k/2), at most all experts: room for a tie of three."""
    return min(n_experts, k + max(2, -(-k // 2)))


def layer_plan(name: str, router: nn.Module) -> LayerPlan:
    """Return the plan of a router; refuses one that is smoothed already."""
    family = family_of(router)
    assert family is not None
    if smoothing_of(router) is not None:
        raise ParameterError(
            f"layer {name!r} is smoothed already: start from the model as it was, or call "
            "`unsmooth_` first"
        )
    grouped = group_limit(family.groups, router) is not None
    k, units = int(attrgetter(family.k)(router)), units_of(family, router, grouped)
    return LayerPlan(name, router, family, k, _experts(family, router), units)


def plan_layers(
    model: nn.Module, layers: Collection[str] | None
) -> tuple[list[LayerPlan], Mapping[str, str]]:
    """Return the routers to smooth in order, and the reason for each that is refused.

    Args:
        model: a Mixture-of-Experts model of transformers.
        layers: names of routers; None for all that can be smoothed.
    """
    routers = find_routers(model)
    unknown = sorted(set(layers or ()) - set(routers))
    require(not unknown, f"no routers named {unknown}; the model has {list(routers)}")
    refused = {}
    for name, router in routers.items():
        reason = refusal(family_of(router) or RouterFamily("", ("",)))
        if reason is not None:
            refused[name] = f"{type(router).__name__}: {reason}"
    named = [name for name in refused if layers is not None and name in layers]
    if named or len(refused) == len(routers):
        name = (named or list(refused))[0]
        family = family_of(routers[name])
        raise UnsupportedModelError(
            f"layer {name!r} of family {family.name if family else '?'!r} cannot be smoothed: "
            f"{refused[name]}"
        )
    chosen = [n for n in routers if n not in refused and (layers is None or n in layers)]
    require(bool(chosen), "layers must name at least one router, got none")
    return [layer_plan(name, routers[name]) for name in chosen], refused


def _experts(family: RouterFamily, router: nn.Module) -> int:
    place = EXPERTS.get(family.name, "num_experts")
    try:
        return int(attrgetter(place)(router))
    except AttributeError:
        matrix = logits_matrix(router)
    if matrix is None:
        raise UnsupportedModelError(
            f"{type(router).__name__} of family {family.name!r} does not tell how many experts it "
            "ranks: give it an attribute `num_experts`"
        )
    return len(matrix)
