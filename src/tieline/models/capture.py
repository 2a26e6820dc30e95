"""Record what the routers of a transformers model choose, while it runs as always.

    with capture(model) as recorder:
        model(**batch)
    trace = recorder.trace()

While the capture lasts, each router's class is a subclass of itself, so that parameters, state-dict
keys, hooks, `output_router_logits` and the outputs stay the same; leaving the block, also by an
exception, restores the classes.

Ranks, counts K(ε) and distances need the scores of all experts, so they are computed here, on the
device of the scores; only the results go to the CPU. Reading a number makes the host wait until an
accelerator has caught up, so records stay there and checks are noted (`models.router_checks`) while
a pass runs; when it has ended, `layers_on_cpu` moves all of it together and raises what a check
refuses.

Documents are numbered as `tieline.models.pass_tokens` says: rows of a batch, and the documents
that a row is packed of; padding is left out. Inside `replay` the record is that of the router's own
choice, before it was replaced.
"""

import functools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline._version import __version__
from tieline.core.errors import TielineError, TraceError, UnsupportedModelError, require
from tieline.core.numerics import is_recomputing
from tieline.core.ranking import Ranked, confirmed_ranks, searched_ranks
from tieline.core.text import layer_label
from tieline.measure.distance import NEIGHBOURS, expert_distances, nearest_tie
from tieline.models.class_changes import Call, swapped_class, untraced, wrapped_class
from tieline.models.demo import DEMO, DEMO_FOLDER
from tieline.models.families import (
    HANDLER,
    RouterFamily,
    chosen_routers,
    family_of,
    transformers_version,
)
from tieline.models.forward_hooks import module_taking_tokens, watch_forward
from tieline.models.number_formats import precision_name, stored_precision
from tieline.models.parallel import class_name
from tieline.models.pass_tokens import Batch, DocumentCounter, document_counter
from tieline.models.router_checks import (
    PassChecks,
    check_distinct_experts,
    check_router_scores,
    check_selected,
    refuse_if,
)
from tieline.models.router_output import RouterOutput, live_output, read_output
from tieline.models.router_rule import (
    GroupLimit,
    Selection,
    at_least_float32,
    restrict_to_groups,
    selection_scores,
)
from tieline.trace.document_runs import PROVENANCE_KEY as DOCUMENT_RUNS
from tieline.trace.document_runs import document_runs
from tieline.trace.record import (
    LayerFacts,
    LayerTrace,
    RoutingTrace,
    Units,
    check_epsilons,
    smallest_id_dtype,
)
from tieline.trace.selection import concatenate


@dataclass(frozen=True)
class RecorderSettings:
    """What a capture keeps of each layer.

    Attributes:
        ranks: number m of ranks kept beyond k; None keeps all.
        epsilons: grid of ε at which K(ε) is counted.
        inputs: whether router inputs are kept.
        distances: whether Euclidean distances to the nearest tie are computed where exact.
    """

    ranks: int | None
    epsilons: tuple[float, ...]
    inputs: bool
    distances: bool


class _Ranking(NamedTuple):
    """Scores inside the chosen groups, their ranks, and the ranks to keep."""

    scores: Tensor
    ranked: Ranked
    kept: Ranked
    facts: LayerFacts


class LayerRecorder:
    """Turns the calls of one router into records."""

    def __init__(self, name: str, family: RouterFamily, settings: RecorderSettings) -> None:
        """Observe the router called `name`, which is of `family`."""
        self.name = name
        self.family = family
        self._settings = settings
        self._verified = False
        self._slots = 0
        self._matrix: tuple[tuple[int, int], Tensor] | None = None

    @torch.no_grad()
    def observe(
        self,
        router: nn.Module,
        call: Call,
        output: Any,
        batch: Batch,
        checks: PassChecks | None = None,
    ) -> LayerTrace:
        """Return the record of one call: experts, scores and distance to a tie.

        With `checks` the record of a model on an accelerator stays there until the pass has ended
        (`layers_on_cpu`); without, it is on the CPU and verified.
        """
        noted = PassChecks() if checks is None else checks
        layer = self._device_record(router, call, output, batch, noted)
        return layers_on_cpu([layer], noted)[0] if checks is None else layer

    def _device_record(
        self, router: nn.Module, call: Call, output: Any, batch: Batch, checks: PassChecks
    ) -> LayerTrace:
        """The record on the device of the scores, with its checks noted."""
        reason = self.family.refused_in_training
        if reason is not None and router.training:
            raise UnsupportedModelError(f"{layer_label(self.name)} ({self.family.name}): {reason}")
        routed = read_output(self.family, router, call, output, checks)
        routed = self._kept_rows(routed, batch, checks)
        smoothed = hasattr(router, HANDLER)  # its own choice is no top-k: the scores alone rank
        ids = routed.ids[:, :0] if smoothed else routed.ids
        selection = selection_scores(self.family, router, routed.logits, call)
        check_router_scores(selection.scores, self.name, batch, checks)
        scores, group_gap = selection.scores, None
        if selection.limit is not None:
            scores, group_gap = restrict_to_groups(scores, ids, selection.limit)
        k = self.family.chosen_count(router) if smoothed else ids.shape[1]
        self._slots = self._slots or (routed.ids.shape[1] if smoothed else k)
        ranking = self._verified_ranking(at_least_float32(scores), ids, k, selection, checks)
        weights = _weights_of_experts(routed, ranking.kept.indices[:, : None if smoothed else k])
        return LayerTrace(
            name=self.name,
            facts=ranking.facts,
            experts=_detached_copy(
                ranking.kept.indices, smallest_id_dtype(ranking.facts.n_experts)
            ),
            scores=_detached_copy(ranking.kept.values, torch.float32),
            weights=_detached_copy(weights[:, :k], torch.float32),
            group_gap=group_gap,
            distance=self._tie_distance(router, ranking),
            near=self._experts_near_threshold(ranking),
            bias=None if selection.bias is None else _detached_copy(selection.bias, torch.float32),
            inputs=self._router_inputs(call, batch, checks),
            faded=_detached_copy(weights[:, k:], torch.float32) if smoothed else None,
            used=(routed.weights != 0).sum(dim=1).int() if smoothed else None,
        )

    def _kept_rows(self, routed: RouterOutput, batch: Batch, checks: PassChecks) -> RouterOutput:
        """The rows of tokens that are no padding; refuses a layer that saw other tokens."""
        require(
            len(routed.logits) == batch.routed,
            f"{layer_label(self.name)} routed {len(routed.logits)} tokens of a batch of "
            f"{batch.routed}; a trace needs layers that see the same tokens: choose them with "
            "`layers`, or capture the part of the model that runs them",
            TielineError,
        )
        if batch.kept is None:
            return routed
        token_rows = checks.on_device(batch.kept, routed.logits.device)
        return RouterOutput(*(tensor.index_select(0, token_rows) for tensor in routed))

    def _verified_ranking(
        self, scores: Tensor, ids: Tensor, k: int, selection: Selection, checks: PassChecks
    ) -> _Ranking:
        """Rank the scores and verify the ranks against the router's own choice `ids`, if any."""
        experts = scores.shape[1]
        ranks = self._settings.ranks
        kept_ranks = experts if ranks is None else max(k + ranks, self._slots)
        of_ties = k + NEIGHBOURS + 1 if self._settings.distances else 0
        needed = min(max(kept_ranks, of_ties), experts)
        ranked = confirmed_ranks(scores, ids, k, needed)
        if ranked is None:
            ranked = self._checked_ranks(scores, ids, k, needed, selection.rounding, checks)
        self._verified = True
        kept = Ranked(ranked.values[:, :kept_ranks], ranked.indices[:, :kept_ranks])
        affine = selection.units == "logits" and self.family.weight is not None
        facts = _layer_facts(experts, k, selection.units, affine, selection.limit)
        return _Ranking(scores, ranked, kept, facts)

    def _checked_ranks(
        self, scores: Tensor, ids: Tensor, k: int, n: int, rounding: float, checks: PassChecks
    ) -> Ranked:
        """The first n ranks by a search; refuses a choice that they do not explain."""
        if not self._verified:
            check_distinct_experts(ids, self.name, self.family.name, checks)
        ranked = searched_ranks(scores, ids, k, n)
        if ids.shape[1]:
            selected, threshold = scores.gather(1, ids), ranked.values[:, k - 1]
            check_selected(selected, threshold, rounding, self.name, self.family.name, checks)
        return ranked

    def _experts_near_threshold(self, ranking: _Ranking) -> Int[Tensor, "tokens epsilons"] | None:
        """Number K(ε) of experts within ε of each token's threshold; None without a grid of ε."""
        if not self._settings.epsilons:
            return None
        threshold = ranking.ranked.values[:, ranking.facts.k - 1]
        counts = counts_near_threshold(ranking.scores, threshold, self._settings.epsilons)
        return _detached_copy(counts, smallest_id_dtype(ranking.facts.n_experts))

    def _tie_distance(
        self, router: nn.Module, ranking: _Ranking
    ) -> Float[Tensor, " tokens"] | None:
        """Distance to the nearest tie; None with groups, whose ties have no closed form."""
        facts = ranking.facts
        if not (self._settings.distances and facts.affine and facts.n_groups == 1):
            return None
        weight = attrgetter(self.family.weight or "")(router)
        if weight.is_meta:  # offloaded: its values are elsewhere between two calls
            return None
        version = 0 if weight.is_inference() else weight._version  # moves with every training step
        state = (weight.data_ptr(), version)
        with torch.autocast(weight.device.type, enabled=False):  # its products would be rounded
            if self._matrix is None or self._matrix[0] != state:
                self._matrix = (state, expert_distances(weight))
            tie = nearest_tie(ranking.scores, facts.k, self._matrix[1], ranking.ranked)
        return tie.distance

    def _router_inputs(
        self, call: Call, batch: Batch, checks: PassChecks
    ) -> Float[Tensor, "tokens width"] | None:
        if not self._settings.inputs:
            return None
        args, keywords = call
        states = (args[0] if args else keywords["hidden_states"]).detach()
        states = states.reshape(-1, states.shape[-1])
        if batch.kept is not None:
            states = states.index_select(0, checks.on_device(batch.kept, states.device))
        return _detached_copy(states, torch.float32)


@functools.cache
def _layer_facts(
    experts: int, k: int, units: Units, affine: bool, limit: GroupLimit | None
) -> LayerFacts:
    """Experts, k, units and groups of a layer."""
    if limit is None:
        return LayerFacts(experts, k, units, affine=affine)
    return LayerFacts(experts, k, units, limit.n_groups, limit.k_groups, limit.score, affine)


def _weights_of_experts(routed: RouterOutput, experts: Int[Tensor, "tokens ranks"]) -> Tensor:
    """Combine weights of these experts, 0 for one that is not in use."""
    if experts.device.type == "cpu" and torch.equal(experts, routed.ids):
        return routed.weights
    of_all = routed.weights.new_zeros(routed.logits.shape)
    return of_all.scatter_add_(1, routed.ids, routed.weights).gather(1, experts)


def counts_near_threshold(
    scores: Float[Tensor, "tokens experts"],
    threshold: Float[Tensor, " tokens"],
    epsilons: tuple[float, ...],
) -> Int[Tensor, "tokens epsilons"]:
    """Count K(ε) = #{i : z_i > z_[k] - ε}, given z_[k], in the dtype of the scores.

    One comparison and one sum of bytes per ε; a difference rounds by 2^-24 of itself.
    """
    below = threshold[:, None] - scores
    counts = torch.empty(len(scores), len(epsilons), dtype=torch.int32, device=scores.device)
    for column, epsilon in enumerate(epsilons):
        within = (below < epsilon).view(torch.int8)
        torch.sum(within, dim=1, dtype=torch.int32, out=counts[:, column])
    return counts


def _detached_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that later changes to the model's own tensors do not reach."""
    return tensor.detach().to(dtype=dtype, copy=True)


def layers_on_cpu(layers: Sequence[LayerTrace], checks: PassChecks) -> list[LayerTrace]:
    """The layers with all their tensors on the CPU; raises what the checks of the pass refuse."""
    noted = checks.pop_noted()
    columns = [
        (index, name, tensor)
        for index, layer in enumerate(layers)
        for name, tensor in layer.tensors().items()
        if tensor.device.type != "cpu"
    ]
    if not columns and not noted:
        return list(layers)
    flags = [wrong for wrong, _ in noted]
    copies = _copy_together([*flags, *(tensor for _, _, tensor in columns)])
    for wrong, (_, refuse) in zip(copies, noted, strict=False):
        refuse_if(wrong, refuse)
    changes: list[dict[str, Tensor]] = [{} for _ in layers]
    for (index, name, _), copy in zip(columns, copies[len(flags) :], strict=True):
        changes[index][name] = copy
    return [replace(layer, **copied) for layer, copied in zip(layers, changes, strict=True)]


def _copy_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, by one transfer per device that holds some of them."""
    copies: dict[int, Tensor] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        numbers = [n for n, tensor in enumerate(tensors) if tensor.device == device]
        numbers.sort(key=lambda n: -tensors[n].dtype.itemsize)  # keeps every start aligned
        sizes = [tensors[n].numel() * tensors[n].dtype.itemsize for n in numbers]
        flat = torch.cat([tensors[n].contiguous().flatten().view(torch.uint8) for n in numbers])
        if device.type == "cuda":  # through pinned memory, which is scarce and so not kept
            pinned = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
            flat = pinned.copy_(flat).clone()
        for n, chunk in zip(numbers, flat.cpu().split(sizes), strict=True):
            copies[n] = chunk.view(tensors[n].dtype).view(tensors[n].shape)
    return [copies[n] for n in range(len(tensors))]


@runtime_checkable
class Sink(Protocol):
    """Consumer of the layers of each forward pass, such as `SummaryBuilder`."""

    def update(
        self,
        layer: int | str,
        chunk: LayerTrace,
        documents: Int[Tensor, " tokens"],
        positions: Int[Tensor, " tokens"],
        tokens: Int[Tensor, " tokens"],
    ) -> None:
        """Take the record of these tokens in one layer, named by its router."""
        ...


class OpenPass(NamedTuple):
    """A forward pass that has begun: its tokens, and its layers so far."""

    batch: Batch
    layers: dict[str, LayerTrace]
    checks: PassChecks


class Recorder:
    """Collects the routing of every forward pass of a model under capture.

    Layers are in the order in which they run. With a sink, the layers of each pass are handed to it
    when the pass has ended, and not kept. A pass that raises leaves nothing behind. Passes in
    several threads are told apart, and are in the trace in the order in which they ended.

    Attributes:
        n_tokens: number of tokens recorded so far.
        provenance: model, revision, dtype and versions, as every trace carries them.
    """

    def __init__(
        self,
        counter: DocumentCounter,
        epsilons: tuple[float, ...],
        provenance: dict[str, object],
        sink: Sink | None,
    ) -> None:
        """Number documents by `counter`; keep passes, or hand them to `sink`."""
        self._counter = counter
        self._epsilons = epsilons
        self.provenance = provenance
        self._sink = sink
        self._open: dict[int, OpenPass] = {}
        self._layers: tuple[str, ...] | None = None
        self._passes: list[RoutingTrace] = []
        self.n_tokens = 0

    def __repr__(self) -> str:
        return f"Recorder({self.provenance.get('model')!r}, {self.n_tokens:,} tokens)"

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Start a forward pass of the model with these arguments."""
        self._open.pop(threading.get_ident(), None)  # of a pass that raised
        batch = self._counter.read_batch(arguments)
        self._open[threading.get_ident()] = OpenPass(batch, {}, PassChecks())

    def observe(self, observer: LayerRecorder, router: nn.Module, call: Call, output: Any) -> None:
        """Record that a router was called and returned `output`."""
        current = self._open.get(threading.get_ident())
        if current is None:
            raise TielineError(
                f"{layer_label(observer.name)} ran outside the forward pass of the captured model, "
                "so its tokens are unknown: call the model, or capture the part that is called"
            )
        if observer.name in current.layers:
            raise TielineError(f"{layer_label(observer.name)} ran twice in one forward pass")
        layer = observer.observe(router, call, output, current.batch, current.checks)
        current.layers[observer.name] = layer

    def finish(self) -> None:
        """End a forward pass without errors: keep it or hand it to the sink."""
        current = self._open.pop(threading.get_ident(), None)
        if current is None or len(current.batch.tokens) == 0:
            return
        batch, records, checks = current
        self._check_same_layers(tuple(records))
        layers = tuple(layers_on_cpu(tuple(records.values()), checks))
        self.n_tokens += len(batch.tokens)
        if self._sink is None:
            keys = batch.tokens, batch.documents, batch.positions
            self._passes.append(RoutingTrace(layers, *keys, self._epsilons, self.provenance))
            return
        for layer in layers:
            self._sink.update(layer.name, layer, batch.documents, batch.positions, batch.tokens)

    def trace(self) -> RoutingTrace:
        """Return the routing of all tokens so far, in the order of the passes."""
        require(self._sink is None, "the sink has consumed the passes: no trace kept", TraceError)
        require(bool(self._passes), "no forward pass has been captured yet", TraceError)
        trace, runs = concatenate(self._passes), document_runs(self._passes)
        noted = trace.provenance | ({DOCUMENT_RUNS: runs} if runs else {})
        return replace(trace, provenance=noted)

    def _check_same_layers(self, names: tuple[str, ...]) -> None:
        """Refuse a forward pass in which other layers ran than before."""
        if self._layers is None:
            require(bool(names), "no router ran in the forward pass", TielineError)
            self._layers = names
        if names != self._layers:
            partial = ", ".join(map(layer_label, sorted({*names} ^ {*self._layers})))
            raise TielineError(f"{partial} ran in some forward passes only")


DEFAULT_EPSILONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Grid of ε, in units of the selection score, at which K(ε) is counted."""

_CAPTURED = "_tieline_captured"


@contextmanager
def capture(
    model: nn.Module,
    *,
    keep: Literal["scores", "inputs"] = "scores",
    ranks: int | Literal["all"] = 4,
    epsilons: tuple[float, ...] = DEFAULT_EPSILONS,
    layers: Collection[str] | None = None,
    distances: bool = True,
    sink: Sink | None = None,
) -> Iterator[Recorder]:
    """Record, per MoE layer and token, the selection scores, combine weights and chosen experts.

    Every forward pass of `model` inside the block is recorded: in evaluation and training, under
    `generate`, with `output_router_logits` or without. A forward pass that activation checkpointing
    repeats is not counted again. Every pass checks that the captured scores explain the choice.

    Args:
        model: a model of transformers whose forward takes `input_ids` or `inputs_embeds`.
        keep: "inputs" also keeps the router inputs (T, D) of each layer.
        ranks: number m of ranks kept beyond the k chosen ones, or "all".
        epsilons: grid at which K(ε), the number of experts within ε of the threshold, is counted.
        layers: names of the router modules to record (`find_routers`); all by default.
        distances: compute the exact Euclidean distance to the nearest tie for affine routers.
        sink: takes the layers of each pass instead of keeping them, such as `SummaryBuilder`.
    """
    require(keep in ("scores", "inputs"), f"keep must be 'scores' or 'inputs', got {keep!r}")
    enough = ranks == "all" or (isinstance(ranks, int) and ranks >= 1)
    require(enough, f"ranks must be at least 1 (gaps need rank k + 1) or 'all', got {ranks!r}")
    check_epsilons(epsilons)
    extra_ranks = None if ranks == "all" else ranks
    settings = RecorderSettings(extra_ranks, epsilons, keep == "inputs", distances)
    routers = chosen_routers(model, layers)
    for name, router in routers.items():
        if hasattr(type(router), _CAPTURED):
            raise TielineError(
                f"{layer_label(name)} is being captured already: leave that block first"
            )
    observers = layer_recorders(routers, settings)
    recorder = Recorder(document_counter(model), epsilons, model_facts(model), sink)
    with ExitStack() as stack:
        for name, router in routers.items():
            observed = _observed_class(type(router), observers[name], recorder)
            stack.enter_context(swapped_class(router, observed))
        for handle in watch_forward(model, recorder):
            stack.callback(handle.remove)
        yield recorder


def layer_recorders(
    routers: Mapping[str, nn.Module], settings: RecorderSettings
) -> dict[str, LayerRecorder]:
    """Return the observer of each router, by its name; refuses inputs that cannot be kept."""
    observers = {}
    for name, router in routers.items():
        family = family_of(router)
        assert family is not None
        require(
            not (settings.inputs and family.in_block),
            f"the inputs of the routers of family {family.name!r} cannot be kept: {family.note}",
        )
        observers[name] = LayerRecorder(name, family, settings)
    return observers


def _observed_class(
    cls: type[nn.Module], observer: LayerRecorder, recorder: Recorder
) -> type[nn.Module]:
    """A subclass of the router's class that shows each call to the recorder."""

    def observe_call(router: nn.Module, call: Call, output: Any) -> Any:
        if not is_recomputing():
            # an emulated number format is the model's, not that of the record's own arithmetic
            with torch._C.DisableTorchFunction():
                router_output = live_output(observer.family, router, output)
                recorder.observe(observer, router, call, router_output)
        return output

    members: dict[str, Any] = {_CAPTURED: True}
    return wrapped_class(cls, observer.family.method, untraced(observe_call), **members)


def _first_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the precision of the first parameter, of a model that does not state one."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return name, class, precision and versions, as every trace carries them."""
    model = module_taking_tokens(model)
    config = getattr(model, "config", None)
    name = str(getattr(config, "_name_or_path", None) or "") or class_name(model)
    return {
        "model": DEMO if name == str(DEMO_FOLDER) else name,
        "architecture": class_name(model),
        "model_type": getattr(config, "model_type", None),
        "revision": getattr(config, "_commit_hash", None),
        "dtype": precision_name(getattr(model, "dtype", None) or _first_dtype(model)),
        "stored_dtype": stored_precision(model),
        "experts_implementation": getattr(config, "_experts_implementation", None),
        "training": model.training,
        "tieline": __version__,
        "torch": torch.__version__,
        "transformers": transformers_version(),
    }
