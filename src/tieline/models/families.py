"""How each family of routers chooses its experts: one declarative record per family.

A record says how selection scores and combine weights follow from what a router returns and holds.
Routers are found by class name (any class of the method resolution order), never by module path,
so a subclass, a wrapped model or a renamed attribute changes nothing. All other code reads the
record and never compares the name of a family.

A router that is not part of transformers is one more record. For a module

    class MyGate(nn.Module):                     # logits W x + b of 8 experts, 2 chosen
        def forward(self, x):
            scores = self.proj(x)               # (tokens, experts)
            weights, ids = scores.sigmoid().topk(self.n_active)
            return {"ids": ids, "weights": weights, "scores": scores}

it says the class, the rule, and where the scores and the choice are:

    tieline.register_family(
        tieline.RouterFamily(
            "mine",
            ("MyGate",),
            combine="sigmoid",                  # weight of a chosen expert: sigmoid(z_i) ...
            renormalise="never",                # ... not divided by their sum
            k="n_active",                       # attributes of the module
            n_experts="proj.out_features",
            weight="proj.weight",
            layout=TupleLayout("scores", "weights", "ids"),
        )
    )

`capture` verifies on every call that the record explains the module's choice, `smooth_` that it
explains its weights. A gate that returns scores alone has `layout=ScoresLayout()`: it can be
captured, and what replaces its choice is refused with this reason. If it is a plain `nn.Linear`,
whose class names no router, the record names it by its block: `("MyBlock.gate",)`.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Literal

from torch import nn

from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.core.plugins import import_added
from tieline.core.text import layer_label
from tieline.models.router_output_layouts import COLUMNS, Layout

Ranked = Literal["logits", "softmax", "sigmoid", "activation"]
Combine = Literal["softmax", "softmax of chosen", "sigmoid", "activation"]
EagerSkip = Literal["never", "with interface", "always"]


@dataclass(frozen=True)
class GroupRule:
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
        routers: names of the router classes. "Block.gate" is the child `gate` of modules of class
            `Block`, for a gate whose own class (`nn.Linear`) says nothing.
        ranked: what the router ranks. A softmax without bias ranks as its logits do, so those
            count as "logits"; "activation" is the callable that the attribute `activation` holds.
        own_dtype: whether the ranking happens in the logits' dtype instead of float32.
        bias: attribute with the correction bias that is added to what is ranked.
        bias_argument: argument of `forward` that brings this bias instead.
        bias_flag: attribute that must be true for the bias to count.
        activation: attribute with the callable that maps logits to scores.
        groups: how groups limit the choice.
        k: number of experts chosen, or the attribute that holds it: of the router, or of the block
            if `routers` names a child of it.
        n_experts: attribute with the number of experts ranked; by default the rows of `weight` if
            the router has no such attribute.
        weight: attribute with the matrix (E, D), if logits are affine in the router's input.
        probabilities: the logits' entry holds softmax probabilities; their logarithms rank as the
            logits do.
        skip_class: the last class means "no expert", returned as expert 0 with weight 0.
        layout: where logits, weights and ids are in the output.
        method: what to observe; a method that is not the call itself takes the logits.
        combine: how a chosen expert's weight follows from the logits, before any scaling; a
            function of the router where that depends on its settings.
        renormalise: whether chosen weights are divided by their sum: "always", "never", or the
            attribute with a flag. Weights by "softmax of chosen" always are.
        sum_offset: number added to the sum of sigmoid or activation weights before dividing by it.
        least_sum: attribute with the smallest sum that softmax weights are divided by.
        norm_order: attribute with the order p of the norm that softmax weights are divided by
            instead of their sum; None there means no division.
        shared_weights: entry of the output with the weights of shared experts, which are divided by
            one sum together with the chosen ones.
        scale: attribute whose value multiplies the weights, or a function of the router.
        eager_skip: when the experts, run eagerly, leave out a slot whose index is the number of
            experts: "never", "with interface" of transformers' experts alone, or "always".
        identity_experts: attributes of the experts module with the number of experts that compute
            the identity, and the index of the first of them.
        counts_columns: whether the two modules around the router count the columns of its output in
            an attribute `top_k`.
        pipeline_checked: whether pipeline stages are tested here though transformers has no plan.
        refused: why these routers cannot be captured at all.
        refused_in_training: why they cannot be captured in training mode.
        refused_weights: why the weights of another choice cannot be computed, so that the choice
            can neither be smoothed nor replayed with live weights.
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
    groups: GroupRule | None = None
    k: str | int = "top_k"
    n_experts: str = "num_experts"
    weight: str | None = "weight"
    probabilities: bool = False
    skip_class: bool = False
    layout: Layout = COLUMNS
    method: str = "__call__"
    combine: Combine | Callable[[nn.Module], Combine] = "softmax"
    renormalise: str = "always"
    sum_offset: float = 1e-20
    least_sum: str | None = None
    norm_order: str | None = None
    shared_weights: int | str | None = None
    scale: str | Callable[[nn.Module], Any] | None = None
    eager_skip: EagerSkip = "never"
    identity_experts: tuple[str, str] | None = None
    counts_columns: bool = False
    pipeline_checked: bool = False
    refused: str | None = None
    refused_in_training: str | None = None
    refused_weights: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        require(bool(self.name and self.routers), "a family needs a name and router class names")
        rule = "the attribute `activation` must be named"
        require((self.ranked == "activation") == (self.activation is not None), rule)
        require(not (self.bias and self.bias_argument), "a bias is an attribute or an argument")
        require(
            isinstance(self.layout, Layout),
            f"layout must be a Layout such as TupleLayout(), got {self.layout!r:.60}",
        )

    @property
    def in_block(self) -> bool:
        """Whether a method of the block routes, so that the router is no module of its own."""
        return self.method != "__call__"

    def chosen_count(self, router: nn.Module) -> int:
        """Return the number of experts k that a router chooses for each token."""
        return self.k if isinstance(self.k, int) else int(attrgetter(self.k)(router))


@cache
def transformers_version() -> str:
    """Version of transformers, read once: packages are searched for it on disk."""
    return version("transformers")


FAMILIES: dict[str, RouterFamily] = {}
"""The record of each router class name, or of "Block.gate" for a child of a block."""

CHILD_FAMILY = "tieline_family"
"""Attribute of a router that its block's class identifies: its record, with k of that block."""

HANDLER = "tieline_handler"
"""Attribute of a router whose outputs are rewritten, as by `smooth_`."""


def register_family(family: RouterFamily) -> RouterFamily:
    """Register a family, so that everything that works on routers finds those of its classes.

    Args:
        family: the record; router classes that are registered already are refused.

    Returns:
        the record.
    """
    registered = [name for name in family.routers if name in FAMILIES]
    require(
        not registered, f"router classes {registered} belong to a registered family", ParameterError
    )
    FAMILIES.update(dict.fromkeys(family.routers, family))
    return family


def family_of(module: nn.Module) -> RouterFamily | None:
    """Return the family of a router; None for other modules.

    A router that is named by its block has one once `find_routers` has met the block.
    """
    for cls in type(module).__mro__:
        if cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__]
    return vars(module).get(CHILD_FAMILY)


def _mark_routers_named_by_block(model: nn.Module) -> None:
    """Store the record on each router that is named by its block, with k as the block has it."""
    router_paths = [
        (*name.split(".", 1), family) for name, family in FAMILIES.items() if "." in name
    ]
    for block in model.modules() if router_paths else ():
        classes = {cls.__name__ for cls in type(block).__mro__}
        for class_name, path, family in router_paths:
            if class_name in classes:
                record = replace(family, k=family.chosen_count(block))
                setattr(block.get_submodule(path), CHILD_FAMILY, record)


def require_module(model: object) -> None:
    """Refuse what is no module of torch."""
    hint = ": give its `module`" if hasattr(model, "module") else ""
    message = f"need a torch.nn.Module, got {type(model).__name__}{hint}"
    require(isinstance(model, nn.Module), message)


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of a model by qualified name, in order; refuses a model without any."""
    require_module(model)
    import_added("families")
    _mark_routers_named_by_block(model)
    routers = {name: m for name, m in model.named_modules() if family_of(m) is not None}
    if routers:
        return routers
    kind = type(model).__name__
    if any("expert" in name.lower() for name, _ in model.named_modules()):
        raise UnsupportedModelError(
            f"{kind} has experts but no router of a known family under transformers "
            f"{transformers_version()}: describe its router with `register_family`"
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
        family = family_of(router)
        if family is not None and family.refused is not None:
            raise UnsupportedModelError(
                f"{layer_label(name)}: {type(router).__name__} of family {family.name!r} "
                f"(transformers {transformers_version()}) cannot be captured: {family.refused}"
            )
    return chosen
