"""A router of transformers that chooses by smooth top-k: a subclass of its own class.

Assigning `router.__class__` keeps parameters, state-dict keys, hooks and `output_router_logits`.
The router runs as always; its logits are ranked again in the family's own scoring, its weights and
experts replaced by k_max columns of each. A slot that is not used is skipped:

    by the index E      where the experts leave this index out (`SkipRule`)
    by weight 0         elsewhere, with an expert of its own, which then runs for nothing

Before the first choice is replaced, the family's record must explain the router's own output.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tieline.errors import UnsupportedModelError
from tieline.hf.families import RouterFamily
from tieline.hf.layouts import choice_in, logits_in, with_choice
from tieline.hf.selection import Selection, at_least_single, restrict, select
from tieline.hf.smooth_scoring import column_weights, family_scale
from tieline.hf.smooth_skip import SkipRule
from tieline.hf.verify import ROUNDINGS, check_selected
from tieline.ranking import kth_largest
from tieline.routing.selective import Groups
from tieline.routing.smooth_columns import Columns, smooth_columns

__all__ = ["Handler", "RouterSmoothing", "attach", "detach", "smoothing_of"]

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
