"""The weights of a family's chosen experts when each is in by a share s between 0 and 1.

    softmax, not renormalised   w_i = p_i s_i
    softmax, renormalised       w_i = e^{z_i} s_i / Σ_j e^{z_j} s_j      "of chosen" is the same
    ernie4_5                    w_i = p_i s_i / max(Σ_j p_j s_j, least)
    dbrx                        w_i = p_i s_i / ‖p s‖_p
    sigmoid, activation         w_i = f(z_i) s_i, over Σ_j f(z_j) s_j + tiny where renormalised

and then times the family's scale, a number or one per expert. With s = 1 on the chosen experts this
is what the router itself returns, which `hf.smooth_router` verifies before anything is smoothed.
"""

from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.hf.families import RouterFamily
from tieline.hf.selection import at_least_single

__all__ = ["column_weights", "family_scale", "renormalises"]

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
