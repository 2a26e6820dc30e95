"""A router of transformers whose scores or whose choice come from ours: a subclass of its class.

    scores    the new router's, of the tokens that the block hands over; else the router's own
    choice    the gate's; else the family's own rule (scoring, bias, groups, scale) on those scores

The new modules are children of the router, `tieline_router` and `tieline_gate`, so they are
trained, moved and saved with it. The class has a name and a family record of its own: where scores
are no product with the router's matrix any more, no distance to a tie is computed from that matrix,
and where a gate chooses that is no top-k of the scores, capture and smoothing refuse by name.
"""

import functools
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from tieline.hf.families import FAMILIES, RouterFamily
from tieline.hf.override import Choice
from tieline.hf.router_scope import logits_matrix
from tieline.hf.selection import at_least_single, select
from tieline.hf.slots import to_slots
from tieline.hf.smooth_scoring import column_weights, family_scale
from tieline.hf.smooth_skip import SkipRule
from tieline.ranking import group_scores, stable_topk, topk_mask
from tieline.routing.routers import CosineRouter, LinearRouter, QuadraticRouter, Router

__all__ = ["Rerouter", "attach_rerouter", "detach_rerouter", "rerouter_of", "start_from"]

ROUTER, GATE, HANDLER = "tieline_router", "tieline_gate", "tieline_rerouter"
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Rerouter:
    """How one router is rerouted.

    Attributes:
        family: the record of its family.
        k: experts that the family's rule chooses.
        skip: how its experts pass over a slot.
    """

    family: RouterFamily
    k: int
    skip: SkipRule

    def __call__(self, router: nn.Module, call: Call, output: Any) -> tuple[Any, ...]:
        """The output with other scores, weights and experts, in its own form and types."""
        scores = self._scores(router, call, output)
        told = scores.softmax(dim=-1) if self.family.probabilities else scores
        gate = getattr(router, GATE, None)
        if gate is None:
            choice = family_choice(self.family, router, told, call, self.k)
        else:
            weights, scale = gate(scores), family_scale(self.family, router)
            choice = to_slots(weights if scale is None else weights * scale, self.skip)
        shape = (*output[1].shape[:-1], choice.ids.shape[1])
        weights = choice.weights.to(output[1]).view(shape)
        logits = told.to(output[0]).view_as(output[0])
        return logits, weights, choice.ids.to(output[2]).view(shape), *output[3:]

    def _scores(self, router: nn.Module, call: Call, output: Any) -> Tensor:
        """Scores (T, E); of probabilities the logarithm, which is their logits up to a shift."""
        new = getattr(router, ROUTER, None)
        if new is None:
            own = output[0].reshape(-1, output[0].shape[-1])
            return own.log() if self.family.probabilities else own
        args, named = call
        tokens = args[0] if args else named["hidden_states"]
        return new(tokens.reshape(-1, tokens.shape[-1]))


def family_choice(
    family: RouterFamily, router: nn.Module, scores: Tensor, call: Call, k: int
) -> Choice:
    """Weights and experts that the family's own rule gives for these scores."""
    selection = select(family, router, scores, call)
    ranked, limit = at_least_single(selection.scores).detach(), selection.limit
    if limit is not None:
        kept = topk_mask(group_scores(ranked, limit.n_groups, limit.score), limit.k_groups)
        inside = kept.repeat_interleave(ranked.shape[1] // limit.n_groups, dim=1)
        ranked = ranked.masked_fill(~inside, limit.fill)
    ids = stable_topk(ranked, k).indices
    share = torch.ones(ids.shape, dtype=ranked.dtype, device=ranked.device)
    return Choice(column_weights(family, router, scores, ids, share), ids)


def attach_rerouter(
    router: nn.Module, how: Rerouter, new: nn.Module | None, gate: nn.Module | None
) -> None:
    """From now on `router` scores by `new` and chooses by `gate`; None keeps its own way."""
    linear = new is None or isinstance(new, LinearRouter)
    for name, module in ((ROUTER, new), (GATE, gate)):
        if module is not None:
            router.add_module(name, module.train(router.training))
    setattr(router, HANDLER, how)
    router.__class__ = _rerouted_class(type(router), how.family, new is None, linear, gate is None)


def detach_rerouter(router: nn.Module) -> None:
    """The router as it was."""
    router.__class__ = type(router).__mro__[1]
    delattr(router, HANDLER)
    for name in (ROUTER, GATE):
        if name in router._modules:
            delattr(router, name)


def rerouter_of(module: nn.Module) -> Rerouter | None:
    """How a router is rerouted; None if it is not."""
    return module.__dict__.get(HANDLER)


@functools.cache
def _rerouted_class(
    cls: type[nn.Module], family: RouterFamily, own: bool, linear: bool, own_gate: bool
) -> type[nn.Module]:
    plain = cls.forward

    @functools.wraps(plain)  # keeps the signature, by which bias arguments are found
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        return self.__dict__[HANDLER](self, (args, kwargs), output)

    kind = ("Own" if own else "Linear" if linear else "Other") + ("" if own_gate else "Gated")
    name = f"{cls.__name__}Rerouted{kind}"
    matrix = family.weight if own else f"{ROUTER}.weight" if linear else None
    reason = None if own_gate else "its gate was replaced by one that is no top-k of its scores"
    FAMILIES[name] = replace(family, routers=(name,), weight=matrix, refused=reason)
    return type(name, (cls,), {"forward": forward, "__module__": cls.__module__})


@torch.no_grad()
def start_from(new: Router, router: nn.Module) -> None:
    """Start a new router from the matrix W and bias of the old one, as far as its form allows.

    A linear router, and a quadratic one with A = 0, then score as the old one does; a cosine router
    compares directions with those of the rows of W.
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


def width_of(router: nn.Module, family: RouterFamily, model: nn.Module) -> int:
    """Width of the tokens that a router is given."""
    matrix = logits_matrix(router) if family.weight is not None else None
    if matrix is not None:
        return matrix.shape[1]
    config: Any = getattr(model, "config", None)
    return int(attrgetter("hidden_size")(config.get_text_config()))
