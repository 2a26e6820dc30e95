"""One forward pass: the call of the model, its logits, and whose experts it takes.

forward            calls a model in evaluation mode, without gradients or cache
finite_logits      its logits, refused where they are no numbers
chosen_output      records a router's choice, compares it with the reference pass, forces it
replayed_output    a router's output with the experts of the reference pass
overridden_output  a model's output with one router's choice replaced by a rule
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.core.errors import NoLogitsError, TielineError, UnsupportedModelError, require
from tieline.core.ranking import sets_differ
from tieline.models.capture import LayerObserver, ObserverSettings
from tieline.models.class_changes import Call
from tieline.models.documents import Batch
from tieline.models.families import HANDLER
from tieline.models.replay import LayerReplay
from tieline.models.router_output import (
    Choice,
    RouterOutput,
    Rule,
    override_choice,
    padded_choice,
    read_output,
    write_output,
)
from tieline.run.observers import Site
from tieline.run.plan import Ids, Pass
from tieline.trace.record import LayerTrace


def forward(model: nn.Module, ids: Int[Tensor, "rows length"]) -> Any:
    """Return the model's output for these tokens, all visible, without a cache."""
    options: dict[str, Any] = {}
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    return model(input_ids=ids.to(model_device(model)), **options)


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter that is not on the meta device."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    raise TielineError(f"{type(model).__name__} has no parameters in memory: nothing can be run")


@contextmanager
def only_running(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; restores each module's training mode on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def finite_logits(output: object, ids: Ids) -> Tensor:
    """Return the logits of an unperturbed run; raises if some are not numbers."""
    logits = model_logits(output, ids)
    wrong = (~(logits < torch.inf)).flatten(0, 1).any(dim=1)  # minus infinity masks words
    require(
        not bool(wrong.any()),
        f"the model's logits are NaN or infinite for {int(wrong.sum())} of {len(wrong)} tokens: "
        "run it in float32 and, if they still are, look for a buffer that is not finite",
        UnsupportedModelError,
    )
    return logits


def model_logits(output: object, ids: Ids) -> Tensor:
    """Return the logits (rows, length, words) of a model's output; raises if it has none."""
    logits = getattr(output, "logits", None)
    require(
        isinstance(logits, Tensor) and logits.shape[:2] == ids.shape,
        "the model gives no logits for its tokens, so damage to its predictions has no measure",
        NoLogitsError,
    )
    assert isinstance(logits, Tensor)
    return logits


@dataclass
class RunningPass:
    """A pass under way.

    Attributes:
        run: the pass.
        ids: its tokens.
        generator: source of its noise.
        choices: by router, its weights and experts, where they are needed later.
        routes: by router, the same as a trace, where they are replayed later.
        lost: by router, the routed weight that each token lost against the reference.
        changed: by router, tokens whose experts a replay changed.
    """

    run: Pass
    ids: Ids
    generator: torch.Generator
    choices: dict[str, Choice] = field(default_factory=dict)
    routes: dict[str, LayerTrace] = field(default_factory=dict)
    lost: dict[str, Tensor] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)


ROUTE_SETTINGS = ObserverSettings(4, (), False, False)
"""What is recorded of routes that later passes replay."""


def chosen_output(
    state: RunningPass,
    reference: RunningPass | None,
    recorded: tuple[bool, bool],
    site: Site,
    call: Call,
    output: Any,
) -> Any:
    """Record a router's choice, compare it with the reference, and force that where asked.

    Args:
        state: the pass.
        reference: the pass to compare with; None for none.
        recorded: whether choices, and whether routes, are kept for later passes.
        site: the router.
        call: its call.
        output: what it returned.
    """
    if recorded[1]:
        with torch._C.DisableTorchFunction():
            state.routes[site.name] = _recorded_route(site, call, output)
    against = None if reference is None else reference.choices.get(site.name)
    if not recorded[0] and against is None:
        return output
    routed = read_output(site.family, site.module, call, output)
    choice = Choice(routed.weights, routed.ids)
    if recorded[0]:
        state.choices[site.name] = choice
    if against is not None:
        forced = state.run.condition.choice == "forced"
        lost, choice = compared_choice(against, routed, forced)
        state.lost[site.name] = lost
    resize = getattr(getattr(site.module, HANDLER, None), "resize", None)
    if resize is not None:  # what counts the columns of a smoothed router
        resize(choice.ids.shape[1])
    return write_output(site.family, output, routed, choice)


def _recorded_route(site: Site, call: Call, output: Any) -> LayerTrace:
    """The choice of one call as the record that a replay takes."""
    tokens = torch.arange(len(read_output(site.family, site.module, call, output).ids))
    batch = Batch(tokens, torch.zeros_like(tokens), tokens, None, len(tokens))
    return LayerObserver(site.name, site.family, ROUTE_SETTINGS).observe(
        site.module, call, output, batch
    )


def replayed_output(
    state: RunningPass, reference: RunningPass, weights: str, site: Site, call: Call, output: Any
) -> Any:
    """Return a router's output with the experts of the reference pass, and count what changed."""
    record = reference.routes.get(site.name)
    if record is None:
        return output
    layer = LayerReplay(site.name, site.module, record, weights)
    replayed = layer(site.module, call, output)
    state.changed[site.name] = layer.changed
    return replayed


def compared_choice(clean: Choice, routed: RouterOutput, forced: bool) -> tuple[Tensor, Choice]:
    r"""Compare a router's choice with that of a reference pass.

    Args:
        clean: weights and experts of the reference.
        routed: what the router returned.
        forced: whether tokens whose experts differ take the choice of the reference.

    Returns:
        The share of routed weight that each token lost, Σ_{e ∈ S \ S'} w_e / Σ_{e ∈ S} w_e, -1
        where its experts are the same; and the choice to take.
    """
    before = routed_set(RouterOutput(routed.logits, clean.weights, clean.ids))
    after = routed_set(routed)
    flipped = sets_differ(before, after)
    missing = ~after.gather(1, clean.ids)
    size = clean.weights.double().sum(dim=1).clamp(min=1e-30)
    share = (clean.weights.double() * missing).sum(dim=1) / size
    lost = torch.where(flipped, share, -1.0).cpu()
    choice = Choice(routed.weights, routed.ids)
    if not forced:
        return lost, choice
    kept, choice = (
        padded_choice(clean, choice.ids.shape[1]),
        padded_choice(choice, clean.ids.shape[1]),
    )
    return lost, Choice(
        torch.where(flipped[:, None], kept.weights, choice.weights),
        torch.where(flipped[:, None], kept.ids, choice.ids),
    )


def routed_set(routed: RouterOutput) -> Tensor:
    """Return the chosen experts as a mask (tokens, experts)."""
    empty = torch.zeros_like(routed.logits, dtype=torch.bool)
    return empty.scatter_(1, routed.ids, True)


def overridden_output(model: nn.Module, router: nn.Module, rule: Rule, ids: Ids) -> Any:
    """Run tokens through a model in memory while one of its routers chooses by a rule.

    Args:
        model: the model, in evaluation mode.
        router: one of its routers.
        rule: maps the router's own output to the choice that it returns.
        ids: token ids (rows, length).
    """
    with override_choice(router, rule):
        return forward(model, ids)
