"""How each family of transformers routers chooses its experts: one declarative record per family.

A record says how the *selection scores* follow from what a router returns and holds. Routers are
found by class (any class of the method resolution order), never by module path, so a subclass, a
wrapped model or a renamed attribute changes nothing. Another family is one more record:
`register_family(RouterFamily("mine", ("MyRouter",)))`.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from torch import nn

from tieline.core.errors import ParameterError, UnsupportedModelError, require

Layout = Literal["topk", "dense", "sorted", "method"]
Ranked = Literal["logits", "softmax", "sigmoid", "activation"]
Combine = Literal["softmax", "softmax of chosen", "sigmoid", "activation", "own"]


@dataclass(frozen=True)
class Groups:
    """Group-limited choice: the best groups first, then experts inside of them.

    Attributes:
        count: attribute of the router that holds the number of groups; None there means no groups.
        chosen: attribute that holds the number of groups a token may use.
        score: a group's score: its largest selection score or the sum of its two largest.
        fill: score that the router gives to experts outside the chosen groups.
        ranked: what is ranked while groups are in force, if not the family's `ranked`.
        when: attribute and value that the router needs to use its groups.
    """

    count: str = "num_group"
    chosen: str = "topk_group"
    score: Literal["max", "top2sum"] = "top2sum"
    fill: float = -math.inf
    ranked: Ranked | None = None
    when: tuple[str, str] | None = None


@dataclass(frozen=True)
class RouterFamily:
    """How the routers of one family choose; attributes are dotted paths on the router.

    Attributes:
        name: folder of the family in transformers, or any name of yours.
        routers: names of the router classes.
        ranked: what the router ranks. A softmax without bias ranks as its logits do, so those
            count as "logits"; "activation" is the callable that the attribute `activation` holds.
        own_dtype: whether the ranking happens in the logits' dtype instead of float32.
        bias: attribute with the correction bias that is added to what is ranked.
        bias_argument: argument of `forward` that brings this bias instead.
        bias_flag: attribute that must be true for the bias to count.
        groups: how groups limit the choice.
        k: attribute with the number of experts chosen.
        weight: attribute with the matrix (E, D), if logits are affine in the router's input.
        probabilities: output 0 is softmax probabilities; their logarithms rank as the logits do.
        skip_class: the last class means "no expert", returned as expert 0 with weight 0.
        layout: where logits, weights and ids stand in the output:
            "topk" (logits, weights (T, k), ids (T, k), ...), "dense" (weights (T, E), logits),
            "sorted" (slots sorted by expert), "method" (weights, ids) of a method given logits.
        method: what to observe; a method that is not the call itself takes the logits.
        combine: how a chosen expert's weight follows from the logits, before any scaling.
        renormalise: whether chosen weights are divided by their sum: always, never or by a flag.
        scale: attribute whose value multiplies the weights.
        refused: why these routers cannot be captured at all.
        refused_in_training: why they cannot be captured in training mode.
        note: what a user of the family should know.
    """

    name: str
    routers: tuple[str, ...]
    ranked: Ranked = "logits"
    own_dtype: bool = False
    bias: str | None = None
    bias_argument: str | None = None
    bias_flag: str | None = None
    activation: str | None = None
    groups: Groups | None = None
    k: str = "top_k"
    weight: str | None = "weight"
    probabilities: bool = False
    skip_class: bool = False
    layout: Layout = "topk"
    method: str = "__call__"
    combine: Combine = "softmax"
    renormalise: str = "always"
    scale: str | None = None
    refused: str | None = None
    refused_in_training: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        require(bool(self.name and self.routers), "a family needs a name and router class names")
        where = "the attribute `activation` must be named"
        require((self.ranked == "activation") == (self.activation is not None), where)
        require(not (self.bias and self.bias_argument), "a bias is an attribute or an argument")


FAMILIES: dict[str, RouterFamily] = {}
"""The record of each router class name."""

HANDLER = "tieline_handler"
"""Attribute of a router whose outputs are rewritten, as `hf.smooth` does it."""


def register_family(family: RouterFamily) -> RouterFamily:
    """Register a family; refuses router classes that are registered already."""
    known = [name for name in family.routers if name in FAMILIES]
    require(not known, f"router classes {known} belong to a registered family", ParameterError)
    FAMILIES.update(dict.fromkeys(family.routers, family))
    return family


def family_of(module: nn.Module) -> RouterFamily | None:
    """Return the family of a router; None for other modules."""
    for cls in type(module).__mro__:
        if cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__]
    return None


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of a model by qualified name, in order; refuses a model without any."""
    found = {name: m for name, m in model.named_modules() if family_of(m) is not None}
    if found:
        return found
    kind = type(model).__name__
    if any("expert" in name.lower() for name, _ in model.named_modules()):
        raise UnsupportedModelError(
            f"{kind} has experts but no router of a known family under transformers "
            f"{version('transformers')}: describe its router with `register_family`"
        )
    raise UnsupportedModelError(f"{kind} is not a Mixture-of-Experts model: it has no router")


def chosen_routers(model: nn.Module, layers: Collection[str] | None) -> dict[str, nn.Module]:
    """Return the routers named in `layers` (None: all); refuses those that cannot be captured."""
    routers = find_routers(model)
    if layers is None:
        layers = routers
    unknown = sorted(set(layers) - set(routers))
    require(not unknown, f"no routers named {unknown}; the model has {list(routers)}")
    require(bool(layers), "layers must name at least one router, got none")
    chosen = {name: router for name, router in routers.items() if name in layers}
    for name, router in chosen.items():
        _refuse(name, router)
    return chosen


def _refuse(name: str, router: nn.Module) -> None:
    family = family_of(router)
    if family is not None and family.refused is not None:
        raise UnsupportedModelError(
            f"layer {name!r}: {type(router).__name__} of family {family.name!r} (transformers "
            f"{version('transformers')}) cannot be captured: {family.refused}"
        )
