"""Replace the router or the gate of a Mixture of Experts of transformers, in place.

    record = reroute_(model, router="perturbed_cosine")       # new scores, the family's own choice
    record = reroute_(model, gate="relu")                     # its own scores, another choice
    record.undo()                                             # or unreroute_(model)

    scores    from the new router, applied to the tokens of the block; else the router's own
    choice    by the gate; else by the family's rule (scoring, bias, groups, scale) on those scores

The interface (logits, weights, indices) stays. A gate that uses a varying number of experts returns
as many columns as the batch needs and skips unused slots. The new modules are children of the
router, `tieline_router` and `tieline_gate`, so they are trained, moved and saved with it. The
router's subclass has a name and a family record of its own: without a linear router no distance to
a tie is computed, and with another gate capture and smoothing refuse by name.
"""

import functools
import json
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.models.class_changes import Call, restore_class
from tieline.models.experts import FLAG, SkipRule, choice_in_slots, experts_of, skip_rule
from tieline.models.families import (
    FAMILIES,
    HANDLER,
    RouterFamily,
    chosen_routers,
    family_of,
    find_routers,
)
from tieline.models.linear_routers import logits_matrix
from tieline.models.router_output import handled_class
from tieline.models.router_output_layouts import COLUMNS, NewChoice
from tieline.models.router_rule import family_choice, family_scale
from tieline.models.saved_models import (
    Restorer,
    forget_change,
    record_change,
    refuse_quantised,
    register_restorer,
)
from tieline.models.smoothed_router import LayerPlan, layer_plan
from tieline.routing.gates import Gate, Law, SelectiveGate
from tieline.routing.layer import GATES, ROUTERS
from tieline.routing.routers import CosineRouter, LinearRouter, QuadraticRouter, Router

ROUTER, GATE, REROUTER = "tieline_router", "tieline_gate", "tieline_rerouter"


@dataclass(frozen=True)
class Rerouter:
    """Handler that gives a router new scores, a new choice, or both.

    Attributes:
        family: family of the router.
        k: experts that the family's rule chooses.
        skip: how the experts skip an unused slot.
    """

    family: RouterFamily
    k: int
    skip: SkipRule

    def __call__(self, router: nn.Module, call: Call, output: Any) -> tuple[Any, ...]:
        """Return the router's output with new scores, weights and experts, in its own layout."""
        scores = self._scores(router, call, output)
        logits_or_probabilities = scores.softmax(dim=-1) if self.family.probabilities else scores
        gate = getattr(router, GATE, None)
        if gate is None:
            choice = family_choice(self.family, router, logits_or_probabilities, call, self.k)
        else:
            weights, scale = gate(scores), family_scale(self.family, router)
            choice = choice_in_slots(weights if scale is None else weights * scale, self.skip)
        logits = logits_or_probabilities.to(output[0]).view_as(output[0])
        return self.family.layout.with_choice((logits, *output[1:]), NewChoice(*choice))

    def _scores(self, router: nn.Module, call: Call, output: Any) -> Tensor:
        """Return scores (T, E); log-probabilities, which are logits up to a shift, if need be."""
        new = getattr(router, ROUTER, None)
        if new is None:
            logits = output[0].reshape(-1, output[0].shape[-1])
            return logits.log() if self.family.probabilities else logits
        args, kwargs = call
        tokens = args[0] if args else kwargs["hidden_states"]
        return new(tokens.reshape(-1, tokens.shape[-1]))


def attach_rerouter(
    router: nn.Module, rerouter: Rerouter, new_router: nn.Module | None, gate: nn.Module | None
) -> None:
    """Make `router` score by `new_router` and choose by `gate`; None keeps its own."""
    linear = new_router is None or isinstance(new_router, LinearRouter)
    for name, module in ((ROUTER, new_router), (GATE, gate)):
        if module is not None:
            router.add_module(name, module.train(router.training))
    setattr(router, REROUTER, rerouter)
    router.__class__ = _rerouted_class(
        type(router), rerouter.family, new_router is None, linear, gate is None
    )


def detach_rerouter(router: nn.Module) -> None:
    """Undo `attach_rerouter`."""
    restore_class(router)
    delattr(router, REROUTER)
    for name in (ROUTER, GATE):
        if name in router._modules:
            delattr(router, name)


def rerouter_of(module: nn.Module) -> Rerouter | None:
    """Return the handler of a rerouted router; None if it is not rerouted."""
    return module.__dict__.get(REROUTER)


@functools.cache
def _rerouted_class(
    cls: type[nn.Module], family: RouterFamily, same_scores: bool, linear: bool, own_gate: bool
) -> type[nn.Module]:
    """Return a subclass whose forward is handled by `Rerouter`, registered as a family."""
    kind = ("Own" if same_scores else "Linear" if linear else "Other") + (
        "" if own_gate else "Gated"
    )
    name = f"{cls.__name__}Rerouted{kind}"
    matrix = family.weight if same_scores else f"{ROUTER}.weight" if linear else None
    reason = None if own_gate else "its gate was replaced by one that is no top-k of its scores"
    FAMILIES[name] = replace(family, routers=(name,), weight=matrix, refused=reason)
    return handled_class(cls, "forward", REROUTER, name)


@torch.no_grad()
def copy_router_weights(new: Router, router: nn.Module) -> None:
    """Copy the matrix W and bias of the old router into a new one, as far as its form allows.

    A linear router, and a quadratic one with A = 0, then has the scores of the old router; a cosine
    router compares directions with the rows of W.
    """
    matrix, bias = logits_matrix(router), getattr(router, "bias", None)
    if matrix is None or tuple(matrix.shape) != (new.n_experts, new.d_model):
        return
    if isinstance(new, LinearRouter):
        new.weight.copy_(matrix)
        if new.bias is not None and isinstance(bias, Tensor):
            new.bias.copy_(bias)
    elif isinstance(new, QuadraticRouter) and new.linear is not None:
        new.left.zero_()
        new.linear.copy_(matrix)
        if isinstance(bias, Tensor):
            new.constant.copy_(bias)
    elif isinstance(new, CosineRouter) and new.projection is None:
        new.weight.copy_(matrix)


def router_input_dim(router: nn.Module, family: RouterFamily, model: nn.Module) -> int:
    """Return the dimension of a router's input."""
    matrix = logits_matrix(router) if family.weight is not None else None
    if matrix is not None:
        return matrix.shape[1]
    config: Any = getattr(model, "config", None)
    return int(attrgetter("hidden_size")(config.get_text_config()))


FEATURE, FLAG_BEFORE = "reroute", "tieline_flag_before"
PERTURBED = {"tau": (0.1, 0.1)}
ROUTER_PRESETS = {"perturbed_cosine": ("cosine", PERTURBED)}
"""Router names that stand for a router with options."""


@dataclass(frozen=True)
class Rerouting:
    """Record of `reroute_`; `undo` reverts it.

    Attributes:
        layers: names of the routers.
        router: name of the new router; None for the model's own.
        gate: name of the new gate; None for the family's own rule.
        router_options: further arguments of the router.
        gate_options: further arguments of the gate.
        layer_options: arguments of the router that differ between layers, by layer name.
    """

    layers: tuple[str, ...]
    router: str | None
    gate: str | None
    router_options: Mapping[str, Any]
    gate_options: Mapping[str, Any]
    layer_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    _model: Any = field(default=None, repr=False, compare=False)

    def undo(self) -> None:
        """Undo the rerouting."""
        model = None if self._model is None else self._model()
        require(model is not None, "the model is gone: there is nothing to undo")
        assert model is not None
        unreroute_(model)

    def save_layer_options(
        self, model: nn.Module, by_layer: Mapping[str, Mapping[str, Any]]
    ) -> "Rerouting":
        """Add options by layer that were fitted after the rerouting, so that they are saved."""
        record = replace(self, layer_options=dict(by_layer))
        record_change(model, FEATURE, record.facts())
        return record

    def facts(self) -> dict[str, Any]:
        """Return JSON values for the configuration."""
        return {
            "layers": list(self.layers),
            "router": self.router,
            "gate": self.gate,
            "router_options": dict(self.router_options),
            "gate_options": dict(self.gate_options),
            "layer_options": {name: dict(options) for name, options in self.layer_options.items()},
        }


def reroute_(
    model: nn.Module,
    *,
    router: str | None = None,
    gate: str | None = None,
    layers: Collection[str] | None = None,
    router_options: Mapping[str, Any] | None = None,
    gate_options: Mapping[str, Any] | None = None,
    layer_options: Mapping[str, Mapping[str, Any]] | None = None,
    keep_start: bool = True,
    seed: int = 0,
) -> Rerouting:
    """Replace the scores or the choice of a model's routers; changes nothing if it raises.

    Args:
        model: a Mixture-of-Experts model of transformers.
        router: a key of `routing.layer.ROUTERS`, or "perturbed_cosine" (τ = 0.1, 0.1).
        gate: a key of `routing.layer.GATES`; gates that take k get the model's k.
        layers: names of routers; None for all.
        router_options: further arguments of the router, such as `{"temperature": 0.07}`.
        gate_options: further arguments of the gate, such as `{"epsilon": 0.2}`.
        layer_options: arguments of the router that differ between layers, by layer name.
        keep_start: start from the old router's matrix as far as the form allows, so that a linear
            or full quadratic router scores as before; otherwise start at random.
        seed: seed of the new routers.
    """
    record = _checked_rerouting(
        router, gate, router_options or {}, gate_options or {}, layer_options or {}
    )
    plans = _routers_to_change(model, layers)
    strange = sorted(set(record.layer_options) - {plan.name for plan in plans})
    require(not strange, f"options of layers that are not rerouted: {strange}")
    refuse_quantised(model, FEATURE)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        modules = [_new_router_and_gate(model, plan, record) for plan in plans]
    if keep_start:
        for plan, (new, _) in zip(plans, modules, strict=True):
            if new is not None:
                copy_router_weights(new, plan.router)
    record = replace(record, layers=tuple(plan.name for plan in plans))
    record_change(model, FEATURE, record.facts())
    for plan, (new, chooser) in zip(plans, modules, strict=True):
        _attach_to_layer(model, plan, new, chooser)
    return replace(record, _model=weakref.ref(model))


def unreroute_(model: nn.Module) -> None:
    """Undo `reroute_` on every router of the model."""
    names = [name for name, module in model.named_modules() if rerouter_of(module) is not None]
    require(bool(names), f"{type(model).__name__} is not rerouted: there is nothing to undo")
    for name in names:
        router, experts = model.get_submodule(name), experts_of(model, name)
        require(
            not hasattr(router, HANDLER),
            f"layer {name!r} was smoothed after it was rerouted: call `unsmooth_` first",
        )
        detach_rerouter(router)
        if experts is not None and hasattr(experts, FLAG_BEFORE):
            setattr(experts, FLAG, getattr(experts, FLAG_BEFORE))
            delattr(experts, FLAG_BEFORE)
    forget_change(model, FEATURE)


def _checked_rerouting(
    router: str | None,
    gate: str | None,
    for_router: Mapping[str, Any],
    for_gate: Mapping[str, Any],
    by_layer: Mapping[str, Mapping[str, Any]],
) -> Rerouting:
    """Check names and options of router and gate and return the record of the rerouting."""
    names = sorted({*ROUTERS, *ROUTER_PRESETS})
    require(router is None or router in names, f"{router=} is not one of {names}")
    require(gate is None or gate in GATES, f"{gate=} is not one of {sorted(GATES)}")
    require(router is not None or gate is not None, "give a router, a gate, or both")
    options_given = {**for_router, **by_layer}
    require(router is not None or not options_given, f"options without a router: {options_given}")
    require(gate is not None or not for_gate, f"options without a gate: {dict(for_gate)}")
    if router in ROUTER_PRESETS:
        router, settings = ROUTER_PRESETS[router]
        for_router = {**settings, **for_router}
    for options in (for_router, for_gate, *by_layer.values()):
        try:
            json.dumps(dict(options))
        except TypeError as problem:
            raise ParameterError(f"options must be plain numbers and words: {problem}") from problem
    return Rerouting((), router, gate, dict(for_router), dict(for_gate), dict(by_layer))


def _routers_to_change(model: nn.Module, layers: Collection[str] | None) -> list[LayerPlan]:
    """Return the routers to change; raises if one is rerouted already or cannot be."""
    plans = []
    for name, router in chosen_routers(model, layers).items():
        family = family_of(router)
        assert family is not None
        if rerouter_of(router) is not None:
            raise ParameterError(f"layer {name!r} is rerouted already: call `unreroute_` first")
        reason = family.refused_weights
        if family.shared_weights is not None:
            reason = "its weights are divided by a sum with those of the shared experts"
        if family.layout != COLUMNS:
            reason = f"its output has the layout {family.layout!r}"
        if family.skip_class:
            reason = "one of its classes skips all experts"
        if reason is not None:
            raise UnsupportedModelError(
                f"layer {name!r} of family {family.name!r} cannot be rerouted: {reason}"
            )
        plans.append(layer_plan(name, router))
    return plans


def _new_router_and_gate(
    model: nn.Module, plan: LayerPlan, record: Rerouting
) -> tuple[Router | None, Gate | None]:
    """Build the new router and the new gate of a layer, on its device and in its dtype."""
    like = next(plan.router.parameters(), None)
    new = chooser = None
    try:
        if record.router is not None:
            dim = router_input_dim(plan.router, plan.family, model)
            new = ROUTERS[record.router](dim, plan.n_experts, **_new_router_options(record, plan))
        if record.gate is not None:
            kind = GATES[record.gate]
            takes_k = issubclass(kind, SelectiveGate) or record.gate == "expert_choice"
            choice = {"k": plan.k} if takes_k else {}
            chooser = kind(**choice, **record.gate_options)
    except TypeError as problem:
        raise ParameterError(f"options that do not fit: {problem}") from problem
    require(
        new is not None
        or not plan.family.probabilities
        or (chooser is not None and Law.SHIFT_INVARIANT in chooser.laws),
        f"layer {plan.name!r} of family {plan.family.name!r} tells probabilities, not logits: the "
        f"gate {record.gate!r} needs a new router as well",
        UnsupportedModelError,
    )
    return _to_device_and_dtype(new, like), _to_device_and_dtype(chooser, like)


def _new_router_options(record: Rerouting, plan: LayerPlan) -> dict[str, Any]:
    """Return the new router's arguments: a bias if the old router has one, JSON lists as tuples."""
    options = {**record.router_options, **record.layer_options.get(plan.name, {})}
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    biased = isinstance(getattr(plan.router, "bias", None), nn.Parameter)
    return {"bias": True} | values if record.router == "linear" and biased else values


def _to_device_and_dtype(module: Any, like: nn.Parameter | None) -> Any:
    """Move a module to the device and dtype of `like`, unless `like` is on meta."""
    if module is None or like is None:
        return module
    return module if like.is_meta else module.to(like.device, like.dtype)


def _attach_to_layer(
    model: nn.Module, plan: LayerPlan, new_router: nn.Module | None, gate: nn.Module | None
) -> None:
    """Attach a new router or gate to a layer and make its experts skip unused slots."""
    experts = experts_of(model, plan.name)
    skip = skip_rule(plan.family, experts, plan.n_experts)
    if experts is not None and hasattr(experts, FLAG):
        setattr(experts, FLAG_BEFORE, getattr(experts, FLAG))
        setattr(experts, FLAG, True)
    attach_rerouter(plan.router, Rerouter(plan.family, plan.k, skip), new_router, gate)


def _restore_rerouting(model: nn.Module, saved: dict[str, Any]) -> None:
    """Attach uninitialised routers and gates to the layers that a checkpoint names."""
    by_layer = saved.get("layer_options", {})
    tables = [saved.get("router_options"), saved.get("gate_options"), by_layer]
    is_well_formed = isinstance(saved.get("layers"), list) and all(
        isinstance(x, dict) for x in tables
    )
    is_well_formed = is_well_formed and all(
        isinstance(options_of_layer, dict) for options_of_layer in by_layer.values()
    )
    require(
        is_well_formed, f"the checkpoint's rerouting is malformed: {saved}", UnsupportedModelError
    )
    options = saved["router_options"], saved["gate_options"], by_layer
    record = _checked_rerouting(saved.get("router"), saved.get("gate"), *options)
    unknown = sorted(set(saved["layers"]) - set(find_routers(model)))
    require(not unknown, f"the checkpoint reroutes {unknown}, which the model does not have")
    for router_change in _routers_to_change(model, saved["layers"]):
        _attach_to_layer(model, router_change, *_new_router_and_gate(model, router_change, record))


register_restorer(FEATURE, Restorer(before=_restore_rerouting))
