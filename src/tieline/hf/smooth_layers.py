"""Which routers of a model can be smoothed, and what has to be known of each.

refusal        why a router's choice cannot be replaced by smooth top-k
LayerPlan      k, number of experts and units of a router
plan_layers    the routers to smooth, and the refused ones counted apart
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter

from torch import nn

from tieline.errors import ParameterError, UnsupportedModelError, require
from tieline.hf.discovery import find_routers
from tieline.hf.families import RouterFamily, family_of
from tieline.hf.router_scope import logits_matrix
from tieline.hf.selection import group_limit, units_of
from tieline.hf.smooth_router import smoothing_of

__all__ = ["LayerPlan", "default_k_max", "layer_plan", "plan_layers", "refusal"]

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
