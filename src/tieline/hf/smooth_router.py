"""How a slot that is not used is left out, so that it costs nothing where the experts allow it.

    experts of transformers, eager        index E, but for the families in `EAGER_COUNTS_ALL`
    the same, grouped_mm and batched_mm   index E, with `_is_expert_parallel` set on the experts
    the same, "tieline"                   index E
    longcat_flash with zero experts       the index of the first zero expert, which is the identity
    all others                            an expert of the token's own with weight 0

The implementation is read when the router runs, since it may be changed at any time.

The weights of a family's chosen experts when each is in by a share s between 0 and 1.

    softmax, not renormalised   w_i = p_i s_i
    softmax, renormalised       w_i = e^{z_i} s_i / Σ_j e^{z_j} s_j      "of chosen" is the same
    ernie4_5                    w_i = p_i s_i / max(Σ_j p_j s_j, least)
    dbrx                        w_i = p_i s_i / ‖p s‖_p
    sigmoid, activation         w_i = f(z_i) s_i, over Σ_j f(z_j) s_j + tiny where renormalised

and then times the family's scale, a number or one per expert. With s = 1 on the chosen experts this
is what the router itself returns, which `hf.smooth_router` verifies before anything is smoothed.

A router of transformers that chooses by smooth top-k: a subclass of its own class.

Assigning `router.__class__` keeps parameters, state-dict keys, hooks and `output_router_logits`.
The router runs as always; its logits are ranked again in the family's own scoring, its weights and
experts replaced by k_max columns of each. A slot that is not used is skipped:

    by the index E      where the experts leave this index out (`SkipRule`)
    by weight 0         elsewhere, with an expert of its own, which then runs for nothing

Before the first choice is replaced, the family's record must explain the router's own output.

Which routers of a model can be smoothed, and what has to be known of each.

refusal        why a router's choice cannot be replaced by smooth top-k
LayerPlan      k, number of experts and units of a router
plan_layers    the routers to smooth, and the refused ones counted apart
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.core.ranking import kth_largest
from tieline.hf.emulate import logits_matrix
from tieline.hf.families import RouterFamily, family_of, find_routers
from tieline.hf.family_table import TRANSFORMERS_FAMILIES
from tieline.hf.layouts import choice_in, logits_in, with_choice
from tieline.hf.selection import (
    ROUNDINGS,
    Selection,
    at_least_single,
    check_selected,
    group_limit,
    restrict,
    select,
    units_of,
)
from tieline.routing.gates import Groups
from tieline.routing.smooth import Columns, smooth_columns

__all__ = [
    "Handler",
    "LayerPlan",
    "RouterSmoothing",
    "SkipRule",
    "attach",
    "column_weights",
    "default_k_max",
    "detach",
    "experts_of",
    "family_scale",
    "layer_plan",
    "plan_layers",
    "refusal",
    "renormalises",
    "skip_rule",
    "smoothing_of",
]

EAGER_COUNTS_ALL = frozenset({"gpt_oss", "nemotron_h", "openai_privacy_filter"})
"""Families whose eager experts take the index E for an expert."""

EAGER_SKIPS = frozenset(family.name for family in TRANSFORMERS_FAMILIES) - EAGER_COUNTS_ALL
"""Families with the experts interface whose eager experts leave the index E out."""

EAGER_ALONE = frozenset({"step3p7"})
"""Families without the experts interface whose experts leave the index E out."""

IMPLEMENTATIONS = frozenset({"grouped_mm", "batched_mm", "tieline"})
"""Implementations that leave the index E out."""

FLAG = "_is_expert_parallel"


@dataclass(frozen=True)
class SkipRule:
    """When the index `sentinel` skips a slot.

    Attributes:
        sentinel: the index.
        eager: whether it does under the family's eager experts.
        config: configuration whose `_experts_implementation` is in force; None where the family has
            one implementation only.
    """

    sentinel: int
    eager: bool
    config: Any = None

    @property
    def works(self) -> bool:
        """Whether the index skips a slot at present."""
        name = getattr(self.config, "_experts_implementation", None) or "eager"
        return self.eager if name == "eager" else name in IMPLEMENTATIONS

    def applied(
        self, ids: Int[Tensor, "tokens columns"], share: Float[Tensor, "tokens columns"]
    ) -> Int[Tensor, "tokens columns"]:
        """The experts with the index in the place of those that are not used, if it skips them."""
        return ids.masked_fill(share == 0, self.sentinel) if self.works else ids


def experts_of(model: nn.Module, router_name: str) -> nn.Module | None:
    """The experts beside a router; None where they are no module."""
    parent = model.get_submodule(router_name.rpartition(".")[0])
    experts = getattr(parent, "experts", None)
    return experts if isinstance(experts, nn.Module) else None


def skip_rule(family: str, experts: nn.Module | None, n_experts: int) -> SkipRule:
    """The rule for the routers of a family.

    Args:
        family: its name.
        experts: the experts that the router serves.
        n_experts: number of experts that the router ranks.
    """
    if family == "longcat_flash" and getattr(experts, "zero_expert_num", 0):
        return SkipRule(int(getattr(experts, "num_routed_experts", 0)), eager=True)
    if experts is None or not hasattr(experts, FLAG):
        return SkipRule(n_experts, eager=family in EAGER_ALONE)
    config = getattr(experts, "config", None)
    return SkipRule(n_experts, eager=family in EAGER_SKIPS, config=config)


TINY = {"lfm2_moe": 1e-6, "muse_spark": 1e-15}
"""What a family adds to a sum before it divides by it; 1e-20 in all others."""

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
    """Combine weights of the experts `ids`, by the rule of the family; zero where the share is.

    Args:
        family: the record of the router's family.
        router: the router, for its settings.
        logits: what it returned, or probabilities where the family returns those.
        ids: experts of each token.
        share: how far each of them is in.
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
    """What the weights are multiplied with: a number, a number per expert, or nothing."""
    if family.name == "openai_privacy_filter":
        return 1 / int(attrgetter(family.k)(router))
    if family.name == "inkling":
        return attrgetter("route_scale")(router) * attrgetter("global_scale")(router)
    return None if family.scale is None else attrgetter(family.scale)(router)


def renormalises(family: RouterFamily, router: nn.Module) -> bool:
    """Whether the chosen weights are divided by their sum before they are scaled."""
    if family.name == "inkling":  # divided by a sum with the shared experts: see `hf.smooth_router`
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
    """How a weight follows from a logit: the family's record, read further where it says "own"."""
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


Call = tuple[tuple[Any, ...], dict[str, Any]]
Handler = Callable[[nn.Module, Call, Any], Any]
"""Given a router, its call and its output, what it shall return instead."""

ATTRIBUTE = "tieline_handler"


def attach(router: nn.Module, family: RouterFamily, handler: Handler) -> None:
    """From now on `router` returns what `handler` makes of its output."""
    setattr(router, ATTRIBUTE, handler)
    method = "forward" if family.method == "__call__" else family.method
    router.__class__ = _handled_class(type(router), method)


def detach(router: nn.Module) -> None:
    """The router as it was before the last `attach`."""
    router.__class__ = type(router).__mro__[1]
    delattr(router, ATTRIBUTE)


def smoothing_of(router: nn.Module) -> "RouterSmoothing | None":
    """How this router is smoothed; None if it is not."""
    handler = getattr(router, ATTRIBUTE, None)
    return handler if isinstance(handler, RouterSmoothing) else None


@functools.cache
def _handled_class(cls: type[nn.Module], method: str) -> type[nn.Module]:
    plain = getattr(cls, method)

    @functools.wraps(plain)  # keeps the signature, by which bias arguments are found
    def handled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        return getattr(self, ATTRIBUTE)(self, (args, kwargs), output)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {method: handled, **names})


@dataclass
class RouterSmoothing:
    """Smooth top-k on one router; an instance is its handler.

    Attributes:
        name: qualified name of the router, for messages.
        family: the record of its family.
        k: experts that are always in.
        k_max: columns of the output.
        epsilon: width of the band, in units of the selection scores.
        a: exponent at the lower end of the ramp.
        b: exponent at its upper end.
        detach_ramp: whether no gradient goes through the shares.
        skip: how a slot is left out.
        checked: whether the record was found to explain the router's own output.
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
    checked: bool = field(default=False, compare=False)

    def __call__(self, router: nn.Module, call: Call, output: Any) -> Any:
        """The output with smooth weights."""
        logits = logits_in(self.family.layout, call[0], output)
        selection = select(self.family, router, logits, call)
        if len(logits) and not self.checked:  # nothing is learned from no tokens
            self._check(router, logits, selection, output)
            self.checked = True
        columns = self.columns(selection)
        weights = column_weights(self.family, router, logits, columns.ids, columns.share)
        if self.family.name == "inkling":
            weights, output = _with_shared(self.family, router, output, logits, weights)
        ids = self.skip.applied(columns.ids, columns.share)
        used = columns.share > 0
        layout = self.family.layout
        return with_choice(layout, output, weights, columns.ids, ids=ids, used=used)

    def columns(self, selection: Selection) -> Columns:
        """Experts and shares for these selection scores."""
        scores = at_least_single(selection.scores)
        limit = selection.limit
        groups = None if limit is None else Groups(limit.n_groups, limit.k_groups, limit.score)
        return smooth_columns(
            scores.detach() if self.detach_ramp else scores,
            self.k,
            epsilon=self.epsilon,
            k_max=self.k_max,
            a=self.a,
            b=self.b,
            groups=groups,
        )

    @torch.no_grad()
    def _check(self, router: nn.Module, logits: Tensor, selection: Selection, output: Any) -> None:
        """Refuse unless the record gives the router's own experts and weights."""
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


def _joint_divisor(masses: Tensor, weights: Tensor) -> Tensor:
    """Σ over chosen and shared experts that inkling divided by, from masses and their weights."""
    return masses.sum(dim=-1, keepdim=True) / weights.sum(dim=-1, keepdim=True).to(masses)


def _with_shared(
    family: RouterFamily, router: nn.Module, output: Any, logits: Tensor, masses: Tensor
) -> tuple[Tensor, tuple[Any, ...]]:
    """Weights divided by the sum with the shared experts, whose weights change by the same sum."""
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
"""Where the number of ranked experts stands, if not in `num_experts`."""

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
    """Why routers of this family cannot be smoothed; None if they can."""
    if family.refused is not None:
        return family.refused
    if family.skip_class:
        return SKIP_CLASS
    return NOT_SMOOTHED.get(family.name)


def default_k_max(k: int, n_experts: int) -> int:
    """K + max(2, k/2): room for a tie of three experts at least, and never more than all."""
    return min(n_experts, k + max(2, -(-k // 2)))


def layer_plan(name: str, router: nn.Module) -> LayerPlan:
    """What has to be known of a router; refuses one that is smoothed already."""
    family = family_of(router)
    assert family is not None
    require(
        smoothing_of(router) is None,
        f"layer {name!r} is smoothed already: call `unsmooth_` before it is smoothed again",
        ParameterError,
    )
    grouped = group_limit(family.groups, router) is not None
    k, units = int(attrgetter(family.k)(router)), units_of(family, router, grouped)
    return LayerPlan(name, router, family, k, _experts(family, router), units)


def plan_layers(
    model: nn.Module, layers: Collection[str] | None
) -> tuple[list[LayerPlan], Mapping[str, str]]:
    """The routers to smooth in order, and the reason for each that is refused.

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
