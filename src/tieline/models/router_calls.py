"""Watching routers at work, of Tieline's own layers and of transformers models, in one form.

    with watch_routing(model, calls.append):
        model(**batch)

Every call of a router becomes a `RouterCall`: the trace of its tokens, sums over all its logits and
what the gate made of them. Hooks exist only inside the block. A forward pass that activation
checkpointing repeats is not reported again unless asked for.

logit_rms      √mean z²            over tokens and experts, z what the router returned
logit_max      max |z|
confidence     mean_t max_e softmax(z_t)_e
used           tokens that used each expert (weight not zero, or chosen)
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import TielineError
from tieline.core.numerics import is_recomputing
from tieline.core.ranking import ranked_choice
from tieline.models.capture import LayerRecorder, RecorderSettings
from tieline.models.class_changes import Call, untraced
from tieline.models.families import chosen_routers, family_of, require_module
from tieline.models.forward_hooks import forward_argument_names, module_called_with_tokens
from tieline.models.pass_tokens import Batch, DocumentCounter
from tieline.models.router_output import live_output, read_output
from tieline.models.router_rule import GroupLimit, at_least_float32, restrict_to_groups
from tieline.routing.gates import Gate, Hard, SelectiveGate, TopK
from tieline.routing.layer import MoE
from tieline.routing.smooth_gates import BandGate
from tieline.trace.record import LayerFacts, LayerTrace, Units

Scores = Float[Tensor, "tokens experts"]


class LogitSums(NamedTuple):
    """Statistics of all logits of a call.

    Attributes:
        mean_square: mean of z².
        largest: largest |z|.
        confidence: mean over tokens of the largest softmax probability.
        least: smallest z.
        row_error: largest |Σ_e z_e - 1| over tokens, 0 where rows are probabilities.
    """

    mean_square: float
    largest: float
    confidence: float
    least: float
    row_error: float


@dataclass(frozen=True, eq=False)
class RouterCall:
    """One call of a router.

    Attributes:
        trace: scores and experts of its tokens, on the CPU.
        logits: sums over what the router returned for all experts; None where it has no tokens.
        used: number of tokens that used each expert.
        active: mean number of experts in use per token.
        epsilon: width of the band of a smooth gate; None for others.
        recomputed: whether checkpointing repeated this call.
        rounding: unit roundoff of the type in which the router returned its logits.
    """

    trace: LayerTrace
    logits: LogitSums | None
    used: Int[Tensor, " experts"]
    active: float
    epsilon: float | None
    recomputed: bool
    rounding: float

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.trace.experts)


@torch.no_grad()
def call_of_transformers_router(
    observer: LayerRecorder, router: nn.Module, call: Call, output: Any, batch: Batch | None
) -> RouterCall:
    """Return the call of a transformers router; its tokens are those of `batch` if counts match.

    Under replay the trace is that of the router's own choice, and `used` that of the replayed one.
    """
    live = live_output(observer.family, router, output)
    logits = read_output(observer.family, router, call, live).logits
    rounding = torch.finfo(logits.dtype).eps
    if batch is None or batch.routed != len(logits):
        rows = len(logits)
        positions = torch.arange(rows, device="cpu")
        no_ids, one_document = torch.full_like(positions, -1), torch.zeros_like(positions)
        batch = Batch(no_ids, one_document, positions, None, rows)
    trace = observer.observe(router, call, live, batch)
    if batch.kept is not None:
        logits = logits.index_select(0, batch.kept.to(logits.device))
    sums, active = _logit_sums(logits, observer.family.probabilities), float(trace.facts.k)
    used = _chosen_counts(trace)
    if live is not output:
        routed = read_output(observer.family, router, call, output)
        ids = routed.ids.cpu() if batch.kept is None else routed.ids.cpu()[batch.kept]
        used = torch.bincount(ids.flatten(), minlength=routed.logits.shape[1])
    return RouterCall(trace, sums, used, active, None, is_recomputing(), rounding)


@torch.no_grad()
def call_of_tieline_layer(
    name: str, layer: MoE, scores: Tensor, weights: Tensor, ranks: int | None
) -> RouterCall:
    """Return the call of a Tieline layer, from the inputs and output of its gate."""
    rounding = torch.finfo(scores.dtype).eps
    flat = at_least_float32(scores.detach()).reshape(-1, scores.shape[-1])
    gate, trace = layer.gate, _own_trace(name, layer.gate, flat, ranks)
    used = _chosen_counts(trace)
    if not isinstance(gate, TopK | Hard):  # a chosen weight may underflow, the others decide by it
        used = (weights.detach().reshape(-1, flat.shape[-1]) != 0).sum(dim=0).cpu()
    active = used.sum().item() / max(1, len(flat))
    epsilon = gate.epsilon.item() if isinstance(gate, BandGate) else None
    sums = _logit_sums(flat, probabilities=False)
    return RouterCall(trace, sums, used, active, epsilon, is_recomputing(), rounding)


def _chosen_counts(trace: LayerTrace) -> Int[Tensor, " experts"]:
    """Tokens that chose each expert."""
    chosen = trace.experts[:, : trace.facts.k].long().flatten()
    return torch.bincount(chosen, minlength=trace.facts.n_experts)


def _own_trace(name: str, gate: Gate, scores: Scores, ranks: int | None) -> LayerTrace:
    """The trace of the scores of a Tieline gate."""
    tokens, experts = scores.shape
    if not isinstance(gate, SelectiveGate | Hard):  # uses all experts, or as many as it likes
        everyone = torch.arange(experts, device="cpu").expand(tokens, experts)
        return LayerTrace(name, LayerFacts(experts, experts), everyone)
    k, bias, selection, facts = 1, None, scores, LayerFacts(experts, 1)
    group_gap = None
    if isinstance(gate, SelectiveGate):
        k, bias, selection = gate.k, gate.selection_bias, gate.selection(scores)
        facts = _gate_facts(gate, experts, ranks_logits=bias is None and selection is scores)
        groups = gate.groups
        if groups is not None and groups.chosen < groups.count:
            limit = GroupLimit(groups.count, groups.chosen, groups.score, -torch.inf)
            selection, group_gap = restrict_to_groups(
                selection, _empty_choice(tokens, scores.device), limit
            )
    n_kept = experts if ranks is None else min(experts, k + ranks)
    ranked = ranked_choice(selection, _empty_choice(tokens, scores.device), k, n_kept)
    return LayerTrace(
        name,
        facts,
        ranked.indices.cpu(),
        ranked.values.cpu(),
        group_gap=None if group_gap is None else group_gap.cpu(),
        bias=None if bias is None else bias.detach().cpu().float(),
    )


def _gate_facts(gate: SelectiveGate, experts: int, ranks_logits: bool) -> LayerFacts:
    """Experts, k, units and groups of a gate."""
    units: Units = "softmax" if gate.scoring == "softmax" else "sigmoid"
    if ranks_logits or gate.order == "after":
        units = "logits"
    if gate.groups is None:
        return LayerFacts(experts, gate.k, units)
    groups = gate.groups
    return LayerFacts(experts, gate.k, units, groups.count, groups.chosen, groups.score)


def _empty_choice(tokens: int, device: torch.device) -> Int[Tensor, "tokens none"]:
    """An empty choice, so that the tie rule alone decides."""
    return torch.empty(tokens, 0, dtype=torch.int64, device=device)


def _logit_sums(logits: Scores, probabilities: bool) -> LogitSums | None:
    """Statistics of all logits of a call; None without tokens."""
    if not logits.numel():
        return None
    z = at_least_float32(logits)
    largest = z.amax(dim=-1)
    confidence = largest if probabilities else (largest - z.logsumexp(dim=-1)).exp()
    low = z.amin()
    size = torch.maximum(largest.amax(), -low)
    rows = (z.sum(dim=-1) - 1).abs().amax()
    sums = torch.stack([z.square().mean(), size, confidence.mean(), low, rows])
    return LogitSums(*sums.tolist())


OnCall = Callable[[RouterCall], None]
"""Called with each call of a router."""


@contextmanager
def watch_routing(
    model: nn.Module,
    on_call: OnCall,
    *,
    ranks: int | None = 4,
    repetitions: bool = False,
    training_only: bool = False,
    on_failure: Callable[[TielineError], None] | None = None,
) -> Iterator[None]:
    """Pass every call of every router of `model` to `on_call` inside the block.

    Tokens that the attention mask of a transformers model hides are left out.

    Args:
        model: a model, or a part of one, with `MoE` layers or transformers routers in it.
        on_call: called with each call, in the order in which routers run.
        ranks: ranks kept beyond k; None keeps all.
        repetitions: report forward passes that checkpointing repeats too.
        training_only: leave out calls in evaluation mode.
        on_failure: called with the error of a call that cannot be read; by default it is raised.
    """
    require_module(model)
    reporter = _CallReporter(on_call, repetitions, training_only, on_failure)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MoE)}
    routers = [m for m in model.modules() if family_of(m) is not None]
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(
                layer.gate.register_forward_hook(reporter.of_gate(name, layer, ranks)).remove
            )
        if routers or not layers:  # the latter refuses a model without routers
            reporter.names = forward_argument_names(model)
            hook = untraced(reporter.begin)
            called = module_called_with_tokens(model)
            stack.callback(called.register_forward_pre_hook(hook, with_kwargs=True).remove)
            for name, router in chosen_routers(model, None).items():
                _watch_router(stack, name, router, reporter, ranks)
        yield


def _watch_router(
    stack: ExitStack, name: str, router: nn.Module, reporter: "_CallReporter", ranks: int | None
) -> None:
    """Report the calls of a transformers router until the stack is closed."""
    family = family_of(router)
    assert family is not None
    observer = LayerRecorder(
        name, family, RecorderSettings(ranks, (), inputs=False, distances=False)
    )
    report = reporter.of_router(observer, router)
    if family.method == "__call__":
        hook = untraced(lambda m, args, kwargs, output: report(args, kwargs, output))
        stack.callback(router.register_forward_hook(hook, with_kwargs=True).remove)
        return

    def observed(*args: Any, **kwargs: Any) -> Any:
        """Run the router's method, and report its call."""
        # of the class at each call, which a replay or capture replaces meanwhile
        output = getattr(type(router), family.method)(router, *args, **kwargs)
        report(args, kwargs, output)
        return output

    setattr(router, family.method, observed)
    stack.callback(delattr, router, family.method)


@dataclass
class _CallReporter:
    """Turns what hooks see into calls; knows the tokens of the current forward pass."""

    on_call: OnCall
    repetitions: bool
    training_only: bool
    on_failure: Callable[[TielineError], None] | None
    batch: Batch | None = None
    names: list[str] = field(default_factory=list)

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read which tokens the pass has; inputs that are not tokens are taken as all visible."""
        first = {"input_ids": args[0]} if args else {}
        arguments = first | dict(zip(self.names, args, strict=False)) | kwargs
        try:
            self.batch = DocumentCounter().read_batch(arguments)
        except (TielineError, RuntimeError, IndexError):
            self.batch = None

    def of_gate(self, name: str, layer: MoE, ranks: int | None) -> Callable[..., None]:
        """Hook of the gate of a Tieline layer."""

        def read(gate: nn.Module, inputs: tuple[Any, ...], weights: torch.Tensor) -> None:
            self._report(
                gate, lambda: call_of_tieline_layer(name, layer, inputs[0], weights, ranks)
            )

        return untraced(read)

    def of_router(
        self, observer: LayerRecorder, router: nn.Module
    ) -> Callable[[tuple[Any, ...], dict[str, Any], Any], None]:
        """Report of a transformers router's call."""

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = ((args, kwargs), output, self.batch)
            self._report(router, partial(call_of_transformers_router, observer, router, *call))

        return read

    def _report(self, module: nn.Module, make: Callable[[], RouterCall]) -> None:
        """Hand a call to whoever watches, unless it is a repetition or not training."""
        if is_recomputing() and not self.repetitions:
            return
        if self.training_only and not module.training:
            return
        try:
            call = make()
        except TielineError as problem:
            if self.on_failure is None:
                raise
            self.on_failure(problem)
        else:
            self.on_call(call)
