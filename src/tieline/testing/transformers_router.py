"""Turn a router module of transformers into a function of logits, with the rule of its family.

The module runs its own code except for the product with its matrix: the input holds the logits in
the first E columns, and inside the call `torch.nn.functional.linear` returns these columns, so that
the logits equal those of the case bit by bit, infinities included.
"""

from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError
from tieline.models.families import RouterFamily, family_of
from tieline.models.router_output_layouts import COLUMNS
from tieline.models.router_rule import (
    combine_rule,
    family_scale,
    group_limit,
    renormalises_weights,
    score_units,
)
from tieline.testing.conformance import Router
from tieline.testing.reference_rules import RouterRule


def family_router(module: nn.Module) -> tuple[Router, RouterRule]:
    """Return a router of transformers as a function for `check_router`, and its rule.

    Args:
        module: a router of a known family that chooses by columns (logits, weights, ids) and ranks
            by logits, softmax or sigmoid; others are refused. Its numbers of experts and of chosen
            ones are fixed.
    """
    family = family_of(module)
    if family is None:
        raise UnsupportedModelError(f"{type(module).__name__} is no router of a known family")
    rule = family_rule(family, module)
    width = attrgetter(family.weight or "")(module).shape[1]

    def route(logits: Tensor, k: int, bias: Tensor | None = None, **groups: int) -> Any:
        """Return the ids and weights of the module for these logits."""
        x = nn.functional.pad(logits, (0, width - logits.shape[1]))
        with torch.no_grad(), patch("torch.nn.functional.linear", _first_input_columns):
            output = module(x, **_set_selection_bias(family, module, bias))
        chosen = family.layout.choice(output, k)
        return chosen.ids, chosen.weights

    return route, rule


def family_rule(family: RouterFamily, module: nn.Module) -> RouterRule:
    """Return the rule of a family with a router's settings; raises if `RouterRule` lacks it."""
    limit = group_limit(family.groups, module)
    units, scale = score_units(family, module, limit is not None), family_scale(family, module)
    combine = combine_rule(family, module)
    is_expressible = (
        units in ("logits", "softmax", "sigmoid")
        and combine != "activation"
        and family.weight is not None
        and family.layout is COLUMNS
        and not (family.in_block or family.skip_class or family.probabilities)
        and family.shared_weights is family.least_sum is family.norm_order is None
        and family.refused_weights is family.identity_experts is None
        and (limit is None or limit.fill == -torch.inf)
        and not (isinstance(scale, Tensor) and scale.numel() > 1)
    )
    if not is_expressible:
        raise UnsupportedModelError(f"the rule of family {family.name!r} is none of RouterRule's")
    ranked = "softmax" if units == "logits" and combine == "softmax" else units
    return RouterRule(
        ranked,  # type: ignore[arg-type]
        combine,  # type: ignore[arg-type]
        renormalises_weights(family, module),
        1.0 if scale is None else float(scale),
        family.bias is not None or family.bias_argument is not None,
        0 if limit is None else limit.n_groups,
        0 if limit is None else limit.k_groups,
        "max" if limit is None else limit.score,
        0.0 if combine.startswith("softmax") else family.sum_offset,
    )


def _first_input_columns(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replace `linear`: return the first columns of the input, as many as the map has rows."""
    return x[..., : len(weight)]


def _set_selection_bias(
    family: RouterFamily, module: nn.Module, bias: Tensor | None
) -> dict[str, Tensor]:
    """Write the selection bias into the router, or return it as the keyword that takes it."""
    if bias is None:
        return {}
    if family.bias_argument is not None:
        return {family.bias_argument: bias}
    is_parameter = family.bias in dict(module.named_parameters())
    stored = module.get_parameter if is_parameter else module.get_buffer
    stored(family.bias or "").copy_(bias.reshape(stored(family.bias or "").shape))
    return {}
