"""One router whose choice is continuous at ties, in the scoring of its own family.

The router runs as always. Its logits are ranked again, each expert gets a share s in [0, 1] of its
weight (`models.router_rule`), and the output is rewritten with more columns (`attach_handler`):
as many as some token of the batch needs for the shares of `ProjectedTopK`, k_max for those of
`SmoothTopK`. With s = 1 on the chosen experts the weights are the router's own; the first call
verifies that before anything is replaced.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.core.ranking import kth_largest
from tieline.core.text import layer_label
from tieline.models.class_changes import Call
from tieline.models.experts import SkipRule
from tieline.models.families import HANDLER, RouterFamily, family_of, find_routers
from tieline.models.linear_routers import logits_matrix
from tieline.models.router_checks import ROUNDINGS, check_selected
from tieline.models.router_output_layouts import NO_CHOICE, Choice, NewChoice
from tieline.models.router_rule import (
    GroupLimit,
    Selection,
    at_least_float32,
    group_limit,
    restrict_to_groups,
    score_units,
    selection_scores,
    weights_and_output,
)
from tieline.routing.gates import Groups
from tieline.routing.smooth_gates import Columns, projected_columns, smooth_columns

GateName = Literal["projected", "ramp"]
"""The shares of `routing.ProjectedTopK`, or those of `routing.SmoothTopK`."""


def router_smoothing(router: nn.Module) -> "RouterSmoothing | None":
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
        layout = self.family.layout
        logits = layout.logits(call[0], output)
        selection = selection_scores(self.family, router, logits, call)
        if len(logits) and not self.checked:  # nothing is learned from no tokens
            self._verify(router, logits, selection, output)
            self.checked = True
        columns = self.columns(selection)
        self.resize(columns.ids.shape[1])
        shares = Choice(columns.share, columns.ids)
        weights, output = weights_and_output(self.family, router, logits, output, shares)
        ids = self.skip.applied(columns.ids, columns.share)
        return layout.with_choice(output, NewChoice(weights, columns.ids, ids, columns.share > 0))

    def resize(self, columns: int) -> None:
        """Let everything that counts the columns of an output know their number."""
        self.k_max = columns
        for module in self.counting:
            setattr(module, "top_k", columns)  # noqa: B010 - no attribute that types know

    def columns(self, selection: Selection) -> Columns:
        """Return experts and shares for these selection scores."""
        scores = at_least_float32(selection.scores)
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
    def _verify(self, router: nn.Module, logits: Tensor, selection: Selection, output: Any) -> None:
        """Refuse a record that does not give the router's own experts and weights."""
        weights, ids = self.family.layout.choice(output, self.k)
        scores = selection.scores
        if selection.limit is not None:
            scores, _ = restrict_to_groups(scores, ids, selection.limit)
        scores = at_least_float32(scores)
        threshold = kth_largest(scores, self.k).squeeze(1)
        chosen = scores.gather(1, ids)
        check_selected(chosen, threshold, selection.rounding, self.name, self.family.name)
        shares = Choice(torch.ones_like(chosen), ids)
        ours, _ = weights_and_output(self.family, router, logits, output, shares)
        single = torch.finfo(torch.float32).eps  # in which many compute whatever the model's dtype
        rounding = max(selection.rounding, torch.finfo(weights.dtype).eps, single)
        size = weights.abs().amax(dim=-1, keepdim=True).to(ours)
        if bool(((ours - weights.to(ours)).abs() > ROUNDINGS * rounding * size).any()):
            raise UnsupportedModelError(
                f"{layer_label(self.name)}: the record of family {self.family.name!r} does not "
                f"explain the weights of {type(router).__name__}, so its choice cannot be smoothed"
            )


def gate_groups(limit: GroupLimit | None) -> Groups | None:
    """The groups of a router in the form that gates take."""
    return None if limit is None else Groups(limit.n_groups, limit.k_groups, limit.score)


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


def smoothing_refusal(family: RouterFamily) -> str | None:
    """Return why routers of this family cannot be smoothed; None if they can."""
    if family.refused is not None:
        return family.refused
    if family.skip_class:
        return SKIP_CLASS
    return family.refused_weights if family.layout.has_choice else NO_CHOICE


def default_k_max(k: int, n_experts: int) -> int:
    """Return k + max(2, k/2), at most all experts: room for a tie of three."""
    return min(n_experts, k + max(2, -(-k // 2)))


def layer_plan(name: str, router: nn.Module) -> LayerPlan:
    """Return the plan of a router; refuses one that is smoothed already."""
    family = family_of(router)
    assert family is not None
    if router_smoothing(router) is not None:
        raise ParameterError(
            f"{layer_label(name)} is smoothed already: start from the model as it was, or call "
            "`unsmooth_` first"
        )
    grouped = group_limit(family.groups, router) is not None
    k, units = family.chosen_count(router), score_units(family, router, grouped)
    return LayerPlan(name, router, family, k, _number_of_experts(family, router), units)


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
        reason = smoothing_refusal(family_of(router) or RouterFamily("", ("",)))
        if reason is not None:
            refused[name] = f"{type(router).__name__}: {reason}"
    refused_names = [name for name in refused if layers is not None and name in layers]
    if refused_names or len(refused) == len(routers):
        name = (refused_names or list(refused))[0]
        family = family_of(routers[name])
        raise UnsupportedModelError(
            f"{layer_label(name)} of family {family.name if family else '?'!r} cannot be smoothed: "
            f"{refused[name]}"
        )
    names = [n for n in routers if n not in refused and (layers is None or n in layers)]
    require(bool(names), "layers must name at least one router, got none")
    return [layer_plan(name, routers[name]) for name in names], refused


def _number_of_experts(family: RouterFamily, router: nn.Module) -> int:
    """The number of experts that a router ranks: an attribute, or the rows of its matrix."""
    try:
        return int(attrgetter(family.n_experts)(router))
    except AttributeError:
        matrix = logits_matrix(router)
    if matrix is None:
        raise UnsupportedModelError(
            f"{type(router).__name__} of family {family.name!r} has neither the attribute "
            f"{family.n_experts!r} of its record (`n_experts`) nor a matrix (`weight`), so the "
            "number of its experts is unknown"
        )
    return len(matrix)


def smoothable_layers(model: nn.Module) -> list[LayerPlan]:
    """Return the routers of a model that choose some of their experts."""
    plans, _ = plan_layers(model, None)
    return [plan for plan in plans if plan.k < plan.n_experts]
