"""Let a transformers model take recorded experts: routes of another engine, precision or run.

    with replay(model, trace) as replayed:
        model(**batch)
    replayed.changed        tokens whose live router would have chosen otherwise, by layer

A row of the record belongs to the document and position of a token. Documents are the rows of all
batches of the block in order, and those that a row is packed of, as `capture` numbers them; the
i-th of them takes the i-th document of the record, and a token id that differs from the record's is
refused with its place. With `match="tokens"` a document takes the one of the record whose tokens
agree instead, in any order and as often as it comes. Tokens without a record go by the live router;
documents without any are counted, and a `ReplayWarning` at the end of the block tells them.

Only the choice is replaced. With live weights the experts of the record are weighted by the rule of
the family from the live logits, so that gradients reach router and experts as if the router had
chosen so itself. Where the live router chose the same set, its output stays untouched, bit by bit.
With recorded weights those are written instead, in the order of the live choice where it is the
same set; no gradient reaches the router through them.

    OrderedRows    the i-th document of all passes takes the i-th document of the record
    MatchedRows    a document takes the document of the record whose tokens agree, in any order

A document matches a recorded one if they agree on all tokens that both have, so that either may be
the beginning of the other: an engine records no route of the last token that it samples, and a
pass may hold a prompt alone. Of several, the longest agreement is taken, then the one of the same
length; recorded documents of equal tokens, or of equal routes where they agree, count as one, the
first of them. What remains ambiguous is refused. Agreements are found by sums over the tokens t_j
of a hash h, H_i = Σ_{j <= i} h(t_j, j) modulo 2^64, and then compared token by token.

Outputs are rewritten inside of the router's `forward`, below the hooks of expert and tensor
parallelism, which cut them to the experts of a rank afterwards. Activation checkpointing repeats a
forward pass without the model around it: the rows of the pass are then found by the fingerprint of
the layer's logits.

Without a record, a repeated pass can keep the choice of the first: `saved_choice_contexts` lets
selective checkpointing save what ranks the scores (topk, sort) and repeat the rest, at k indices
and scores per token:

    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": saved_choice_contexts}
    )
"""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tieline.core.errors import (
    ParameterError,
    TielineError,
    TraceError,
    UnsupportedModelError,
    require,
)
from tieline.core.numerics import is_recomputing
from tieline.core.text import layer_label
from tieline.models.class_changes import Call, swapped_class, untraced, wrapped_class
from tieline.models.families import HANDLER, RouterFamily, chosen_routers, family_of
from tieline.models.forward_hooks import watch_forward
from tieline.models.pass_tokens import Batch, document_counter
from tieline.models.router_output import forget_live_output, note_live_output, with_experts
from tieline.models.router_output_layouts import NO_CHOICE, Choice
from tieline.models.router_rule import weights_and_output
from tieline.trace.counts import token_hash
from tieline.trace.readers import import_trace
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.trace.store import load_trace
from tieline.trace.writers import model_layer_indices

MOST_NAMED = 4
"""Documents that a message names."""


class OrderedRows:
    """The row of each document and position; -1 without one."""

    def __init__(self, trace: RoutingTrace) -> None:
        """Read the documents and positions of a record."""
        documents = trace.documents.numpy()
        numbers, order = np.unique(documents, return_inverse=True)
        self.tokens = trace.tokens
        positions = trace.positions.numpy()
        require(int(positions.min()) >= 0, "positions of a record must not be negative", TraceError)
        lengths = np.zeros(len(numbers), np.int64)
        np.maximum.at(lengths, order, positions + 1)
        self.numbers = numbers
        self.starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        cells = self.starts.numpy()[order] + positions
        self.cells = self.starts.new_full((int(self.starts[-1]) + 1,), -1)
        self.cells[torch.from_numpy(cells)] = torch.arange(len(cells), device="cpu")
        twice = len(np.unique(cells)) < len(cells)
        require(not twice, "a document of the record has a position twice", TraceError)

    def rows_of(self, batch: Batch) -> Int[Tensor, " tokens"]:
        """Return the row of each token of a batch; refuses token ids that differ."""
        rows = self.rows_at(batch.documents, batch.positions)
        recorded = self.tokens[rows.clamp(min=0)].long()
        wrong = (rows >= 0) & (recorded >= 0) & (batch.tokens >= 0) & (recorded != batch.tokens)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise TraceError(
                f"the record belongs to other tokens: document {int(batch.documents[first])}, "
                f"position {int(batch.positions[first])} has token {int(batch.tokens[first])}, the "
                f"record {int(recorded[first])} ({int(wrong.sum())} of {len(wrong)} tokens "
                'differ); documents in another order are found by match="tokens"'
            )
        return rows

    def rows_at(self, documents: Tensor, positions: Tensor) -> Int[Tensor, " tokens"]:
        """Return the rows of places in the record, by the order of its documents."""
        count = len(self.starts) - 1
        in_record = (documents >= 0) & (documents < count)
        document = documents.clamp(min=0, max=max(count - 1, 0))
        cell = self.starts[document] + positions
        in_record &= cell < self.starts[document + 1]
        return torch.where(in_record, self.cells[cell.clamp(max=len(self.cells) - 1)], -1)


class MatchedRows:
    """The rows of the recorded document whose tokens are those of a document; -1 without one."""

    def __init__(self, trace: RoutingTrace, layers: Sequence[LayerTrace]) -> None:
        """Read the tokens of a record; `layers` are those that will be replayed."""
        self._order = OrderedRows(trace)
        starts, cells = self._order.starts, self._order.cells[:-1]
        self._layers = layers
        lacks = (cells < 0).nonzero()
        if len(lacks):
            document = int(torch.searchsorted(starts, lacks[0], right=True)) - 1
            raise TraceError(
                f"document {self._order.numbers[document]} of the record lacks positions before "
                'its last, so that its tokens cannot be matched: replay it with match="order"'
            )
        self._tokens = trace.tokens.long()[cells]
        require(
            bool((self._tokens >= 0).all()),
            'the record has no token ids to match by: replay it with match="order"',
            TraceError,
        )
        self._starts = starts.numpy()[:-1]
        self._lengths = np.diff(starts.numpy())
        positions_of_tokens = np.arange(len(self._tokens)) - np.repeat(self._starts, self._lengths)
        sums = np.concatenate(
            [[0], token_hash(self._tokens, torch.from_numpy(positions_of_tokens)).cumsum()]
        )
        self._sums = sums  # of all tokens before, the documents one after the other
        self._open: dict[int, list[int]] = {}

    def rows_of(self, batch: Batch) -> Int[Tensor, " tokens"]:
        """Return the row of each token of a batch; refuses an ambiguous match."""
        require(
            bool((batch.tokens >= 0).all()),
            'the model was given embeddings: replay them with match="order"',
            TielineError,
        )
        matches = torch.full_like(batch.documents, -1)
        documents = self._continued_tokens(batch)
        for number, tokens in documents.items():
            matches[batch.documents == number] = self._matching_document(number, tokens)
        self._open = {number: tokens.tolist() for number, tokens in documents.items()}
        return self._order.rows_at(matches, batch.positions)

    def _continued_tokens(self, batch: Batch) -> dict[int, np.ndarray]:
        """Tokens of each document of a batch, with those of the cache that it continues."""
        documents: dict[int, np.ndarray] = {}
        for number in batch.documents.unique().tolist():
            of_document = batch.documents == number
            cached = self._open.get(number, [])[: int(batch.positions[of_document][0])]
            tokens = batch.tokens[of_document].tolist()
            documents[number] = np.array(cached + tokens, dtype=np.int64)
        return documents

    def _matching_document(self, number: int, tokens: np.ndarray) -> int:
        """The recorded document of these tokens; -1 without one."""
        positions = torch.arange(len(tokens), device="cpu")
        prefix = token_hash(torch.from_numpy(tokens), positions).cumsum()
        shared = np.minimum(self._lengths, len(tokens))
        recorded = self._sums[self._starts + shared] - self._sums[self._starts]
        agree = (recorded == prefix[shared - 1]).nonzero()[0]
        agree = [int(i) for i in agree if self._holds_tokens(int(i), tokens)]
        if not agree:
            return -1
        longest = max(int(shared[i]) for i in agree)
        longest_ones = [i for i in agree if shared[i] == longest]
        exact = [i for i in longest_ones if self._lengths[i] == len(tokens)]
        candidates = exact or longest_ones
        self._check_single(number, longest, candidates)
        return candidates[0]

    def _holds_tokens(self, document: int, tokens: np.ndarray) -> bool:
        """Whether a recorded document and these tokens agree over the shorter of both."""
        start, length = self._starts[document], min(self._lengths[document], len(tokens))
        return bool((self._tokens[start : start + length].numpy() == tokens[:length]).all())

    def _check_single(self, number: int, length: int, candidates: list[int]) -> None:
        """Refuse candidates that go on otherwise and whose routes differ where they agree."""
        first, others = candidates[0], candidates[1:]
        others = [i for i in others if not self._have_equal_tokens(first, i)]
        if all(self._have_equal_routes(first, i, length) for i in others):
            return
        numbers = ", ".join(str(self._order.numbers[i]) for i in candidates[:MOST_NAMED])
        more = ", ..." * (len(candidates) > MOST_NAMED)
        raise TraceError(
            f"document {number} ({length} tokens) is the beginning of {len(candidates)} documents "
            f"of the record ({numbers}{more}) whose routes differ: replay whole documents, or a "
            "record of these"
        )

    def _have_equal_tokens(self, a: int, b: int) -> bool:
        """Whether two recorded documents have the same token ids."""
        starts, lengths = self._starts, self._lengths
        return torch.equal(*(self._tokens[starts[i] : starts[i] + lengths[i]] for i in (a, b)))

    def _have_equal_routes(self, a: int, b: int, length: int) -> bool:
        """Whether the first tokens of two recorded documents chose the same experts."""
        positions = torch.arange(length, device="cpu")
        rows = [self._order.rows_at(torch.full_like(positions, i), positions) for i in (a, b)]
        for layer in self._layers:
            k = layer.facts.k
            if not torch.equal(*(layer.experts[r, :k].sort(dim=1).values for r in rows)):
                return False
        return True


MOST_PASSES = 64
"""Forward passes whose rows are remembered for activation checkpointing."""

NEAR = 2**-7
"""Gap, over the largest score of the layer, below which two roundings to bfloat16 may flip."""

SHOWN = 6
"""Token ids that a message shows of a document."""

_REPLAYED = "_tieline_replayed"


class ReplayWarning(UserWarning):
    """Documents of a replay had no record."""


@dataclass
class ReplayCounts:
    """What a replay did so far.

    Attributes:
        tokens: tokens of all forward passes, padding left out.
        recorded: tokens of them that have a record.
        documents: documents of all forward passes.
        unmatched: documents of them without any record, routed live.
        replayed: choices that were taken from the record, by layer.
        changed: choices of them that the live router would have made otherwise, by layer.
        bytes_full: bytes of the ids of all recorded tokens, in the smallest type.
        bytes_sent: bytes of the ids that this replay needs, with the place of each row if it is
            partial.
    """

    tokens: int = 0
    recorded: int = 0
    documents: int = 0
    unmatched: int = 0
    replayed: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    bytes_full: int = 0
    bytes_sent: int = 0

    @property
    def saved(self) -> float:
        """Share of bytes that a partial replay saves."""
        return 1 - self.bytes_sent / self.bytes_full if self.bytes_full else 0.0


@contextmanager
def replay(
    model: nn.Module,
    routes: RoutingTrace | str | Path | Any,
    weights: Literal["live", "recorded"] = "live",
    *,
    match: Literal["order", "tokens"] = "order",
    only: Literal["near-ties"] | float | None = None,
    layers: Collection[str] | None = None,
) -> Iterator[ReplayCounts]:
    """Let a model take recorded experts inside the block.

    Works in evaluation, in training, under `generate`, with activation checkpointing, and in models
    that transformers' `DistributedConfig` cuts for tensor or expert parallelism: each rank enters
    the block with the same routes.

    Args:
        model: a model of transformers of a family that `capture` supports.
        routes: a trace, the folder of one, or anything that `tieline.trace.import_trace` reads.
        weights: "live" weights the recorded experts by the live logits; "recorded" uses the combine
            weights of the trace.
        match: "order" gives the i-th document of the passes the i-th of the record; "tokens" the
            one whose tokens agree (`MatchedRows`), for trainers that shuffle rows.
        only: replay near ties alone: tokens whose recorded gap is below this threshold, or
            "near-ties" for 2^-7 of the layer's largest score, what two roundings to bfloat16 may
            move. Needs a trace with scores.
        layers: names of the routers to replay; all by default.
    """
    trace: Any = routes
    if isinstance(routes, str | Path) and (Path(routes) / "tieline.json").is_file():
        trace = load_trace(routes)
    elif not isinstance(routes, RoutingTrace):
        trace = import_trace(routes)
    if weights not in ("live", "recorded"):
        raise ParameterError(f'weights are "live" or "recorded", got {weights!r:.40}')
    if match not in ("order", "tokens"):
        raise ParameterError(f'match is "order" or "tokens", got {match!r:.40}')
    routers = chosen_routers(model, layers)
    records = _records_by_router(trace, list(routers), every=layers is None)
    in_order = match == "order"
    table = OrderedRows(trace) if in_order else MatchedRows(trace, list(records.values()))
    state = ReplayCounts()
    session = _ReplaySession(model, table, state)
    with ExitStack() as stack:
        for name, record in records.items():
            router = routers[name]
            layer = LayerReplay(name, router, record, weights, only, session)
            layer.count_bytes(state, only is not None)
            members: dict[str, Any] = {_REPLAYED: True}
            method = "forward" if layer.family.method == "__call__" else layer.family.method
            rewritten = wrapped_class(type(router), method, untraced(layer.__call__), **members)
            stack.enter_context(swapped_class(router, rewritten))
            stack.callback(forget_live_output, router)
        for handle in watch_forward(model, session):
            stack.callback(handle.remove)
        yield state
    session.warn_unmatched()


def _records_by_router(trace: RoutingTrace, names: list[str], every: bool) -> dict[str, LayerTrace]:
    """The record of each router: by its name, by the number in it, or in order of depth.

    Routers without a record, such as those of images where text was recorded, stay live.
    """
    by_name = {layer.name: index for index, layer in enumerate(trace.layers)}
    if all(name in names for name in by_name) if every else all(name in by_name for name in names):
        return {name: trace.layers[by_name[name]] for name in names if name in by_name}
    numbers, depths = model_layer_indices(names), model_layer_indices(list(by_name))
    fits = set(numbers) == set(depths) if every else set(numbers) <= set(depths)
    if fits and len(set(numbers)) == len(names):
        return {name: trace.layers[depths.index(n)] for name, n in zip(names, numbers, strict=True)}
    require(
        every and len(names) == len(trace.layers),
        f"the record has layers {[layer.name for layer in trace.layers][:4]}..., the model routers "
        f"{names[:4]}...: {len(trace.layers)} for {len(names)}, and neither names nor numbers "
        "match",
        TraceError,
    )
    return dict(zip(names, trace.layers, strict=True))


@dataclass
class _ReplayPass:
    """The rows of one forward pass, for every row of the routers, and its logits' fingerprints."""

    rows: Int[Tensor, " routed"]
    prints: dict[str, float] = field(default_factory=dict)
    moved: dict[torch.device, Tensor] = field(default_factory=dict)

    def rows_on_device(self, device: torch.device) -> Tensor:
        """The rows on a device."""
        if device not in self.moved:
            self.moved[device] = self.rows.to(device)
        return self.moved[device]


class _ReplaySession:
    """Tells each layer which rows of the record belong to the tokens that it routes."""

    def __init__(
        self, model: nn.Module, table: OrderedRows | MatchedRows, state: ReplayCounts
    ) -> None:
        self._model, self._counter = model, document_counter(model)
        self._table, self.state = table, state
        self._unmatched: dict[int, str] = {}
        self._passes: list[_ReplayPass] = []
        self._running = False

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Start a forward pass of the model with these arguments."""
        batch = self._counter.read_batch(arguments)
        rows = self._table.rows_of(batch)
        self.state.tokens += len(rows)
        self.state.recorded += int((rows >= 0).sum())
        self._count_documents(batch, rows)
        if batch.kept is not None:
            rows = rows.new_full((batch.routed,), -1).index_copy(0, batch.kept, rows)
        self._passes = [*self._passes[1 - MOST_PASSES :], _ReplayPass(rows)]
        self._running = True

    def finish(self) -> None:
        """End a forward pass."""
        self._running = False

    def _count_documents(self, batch: Batch, rows: Tensor) -> None:
        """Count the documents that begin here, and those without a record so far."""
        recorded = set(batch.documents[rows >= 0].tolist())
        for number in batch.documents.unique().tolist():
            if number in recorded:
                self._unmatched.pop(number, None)
            elif number >= self.state.documents:
                tokens = batch.tokens[batch.documents == number]
                ids = " ".join(map(str, tokens[:SHOWN].tolist()))
                self._unmatched[number] = f"document {number} of {len(tokens)} tokens, ids {ids}"
        if len(batch.documents):
            self.state.documents = max(self.state.documents, int(batch.documents.max()) + 1)
        self.state.unmatched = len(self._unmatched)

    def warn_unmatched(self) -> None:
        """Warn about the documents that had no record."""
        if self._unmatched:
            first = next(iter(self._unmatched.values()))
            warnings.warn(
                f"{len(self._unmatched)} of {self.state.documents} documents had no record and "
                f"were routed live (first: {first} ...); rows padded without an attention mask or "
                "cut off at their beginning have none",
                ReplayWarning,
                stacklevel=4,
            )

    def rows(self, name: str, logits: Tensor) -> Tensor:
        """Return the record's row of each token of a call, -1 without one."""
        if is_recomputing():
            return self._repeated_pass(name, logits).rows_on_device(logits.device)
        if not self._running:
            raise TielineError(
                f"{layer_label(name)} ran outside the forward pass of the model under replay, so "
                "its tokens are unknown: call the model itself, or replay the part that is called"
            )
        current = self._passes[-1]
        if len(current.rows) != len(logits):
            raise TielineError(
                f"{layer_label(name)} routed {len(logits)} tokens of a batch of {len(current.rows)}"
            )
        if torch.is_grad_enabled() or self._model.training:
            current.prints[name] = _logits_fingerprint(logits)
        return current.rows_on_device(logits.device)

    def _repeated_pass(self, name: str, logits: Tensor) -> _ReplayPass:
        """The pass that is being repeated: the one whose logits were nearest."""
        passes = [
            old for old in self._passes if len(old.rows) == len(logits) and name in old.prints
        ]
        require(bool(passes), f"{layer_label(name)}: the repeated pass is not known", TielineError)
        value = _logits_fingerprint(logits)
        return min(reversed(passes), key=lambda old: abs(old.prints[name] - value))


def _logits_fingerprint(logits: Tensor) -> float:
    """A number that tells the logits of one pass from those of another."""
    detached = logits.detach()
    factors = torch.arange(1, len(detached) + 1, device=detached.device).sqrt()
    return float((detached.float().sum(1) * factors).double().sum())


class LayerReplay:
    """Rewrites the outputs of one router."""

    def __init__(
        self,
        name: str,
        router: nn.Module,
        record: LayerTrace,
        weights: str,
        only: str | float | None = None,
        session: _ReplaySession | None = None,
    ) -> None:
        """Let a router take the experts of a record.

        Args:
            name: name of the router.
            router: the router.
            record: experts of the tokens that it will route, in order unless there is a session.
            weights: "live" or "recorded", as for `replay`.
            only: which tokens, as for `replay`.
            session: finds the row of the record that belongs to each token.
        """
        family = family_of(router)
        assert family is not None
        if hasattr(type(router), _REPLAYED):
            raise TielineError(
                f"{layer_label(name)} is under replay already: leave that block first"
            )
        if getattr(router, HANDLER, None) is not None:
            raise UnsupportedModelError(
                f"{layer_label(name)} is smoothed: it uses other numbers of experts than a record "
                "has"
            )
        require(
            family.layout.has_choice,
            f"{layer_label(name)} of family {family.name!r} cannot be replayed: {NO_CHOICE}",
            UnsupportedModelError,
        )
        self.name, self.family, self.session = name, family, session
        self.k = family.chosen_count(router)
        k = record.facts.k
        require(
            k == self.k, f"{layer_label(name)} chooses {self.k} experts, the record {k}", TraceError
        )
        self.ids = record.experts[:, :k].long()
        self.sets = self.ids.sort(dim=1).values
        self.highest = int(self.sets.max())
        self.n_experts = record.facts.n_experts
        self.weights: Tensor | None = None
        if weights == "recorded":
            require(
                record.weights is not None,
                f"{layer_label(name)}: the record has no combine weights: replay with live ones",
                TraceError,
            )
            self.weights = record.weights
        self.selected = _replayed_rows(record, only)
        self.changed = 0
        if session is not None:
            session.state.replayed.setdefault(name, 0)
            session.state.changed.setdefault(name, 0)

    def count_bytes(self, state: ReplayCounts, partial: bool) -> None:
        """Add the bytes of this layer's ids."""
        size = self.k * (1 if self.n_experts <= 256 else 2)
        state.bytes_full += len(self.ids) * size
        state.bytes_sent += int(self.selected.sum()) * (size + 4 * partial)

    def __call__(self, router: nn.Module, call: Call, output: Any) -> Any:
        """Return the output with the recorded experts of the tokens that have them."""
        family = self.family
        logits = family.layout.logits(call[0], output)
        self._move_records(logits.device, logits.shape[1])
        rows = self._recorded_rows(logits)
        live = live_choice(family, output, self.k, logits.shape[1])
        recorded_rows = rows.clamp(min=0)
        has = (rows >= 0) & self.selected.index_select(0, recorded_rows)
        differ = has & (live.ids.sort(dim=1).values != self.sets[recorded_rows]).any(dim=1)
        # the one number that is read: an accelerator is waited for once per call
        changed, replayed = torch.stack([differ.sum(), has.sum()]).tolist()
        self.changed = changed
        if self.session is not None and not is_recomputing():
            self.session.state.replayed[self.name] += replayed
            self.session.state.changed[self.name] += changed
        if self.session is not None:
            forget_live_output(router)
        if self.weights is None and not changed:
            return output
        written = self._replayed_output(router, logits, output, live, recorded_rows, has, differ)
        return written if self.session is None else note_live_output(router, output, written)

    def _recorded_rows(self, logits: Tensor) -> Tensor:
        """Row of the record of each token, -1 without one."""
        if self.session is None:
            return torch.arange(len(logits), device=logits.device)
        return self.session.rows(self.name, logits)

    def _move_records(self, device: torch.device, experts: int) -> None:
        """Bring the record to the device of the layer, once."""
        if self.highest >= experts:
            raise TraceError(
                f"{layer_label(self.name)} has {experts} experts, the record names {self.highest}"
            )
        if self.ids.device != device:
            self.ids, self.sets, self.selected = (
                x.to(device) for x in (self.ids, self.sets, self.selected)
            )
            self.weights = None if self.weights is None else self.weights.to(device)

    def _replayed_output(
        self,
        router: nn.Module,
        logits: Tensor,
        output: Any,
        live: Choice,
        recorded_rows: Tensor,
        has: Bool[Tensor, " tokens"],
        differ: Bool[Tensor, " tokens"],
    ) -> Any:
        ids = torch.where(differ[:, None], self.ids[recorded_rows], live.ids)
        weights = live.weights
        changed = differ.nonzero().squeeze(1)
        if len(changed):
            live_weights, output = self._live_weights(router, logits, output, ids, changed)
            weights = weights.index_copy(0, changed, live_weights.to(weights))
        if self.weights is not None:
            recorded = _recorded_weights(self.ids[recorded_rows], self.weights[recorded_rows], ids)
            weights = torch.where(has[:, None], recorded.to(weights), weights)
        return with_experts(self.family, output, Choice(weights, ids), logits.shape[1])

    def _live_weights(
        self, router: nn.Module, logits: Tensor, output: Any, ids: Tensor, changed: Tensor
    ) -> tuple[Tensor, Any]:
        """Weights of the changed rows by the family's rule, and an output that fits them."""
        family, rows = self.family, ids[changed]
        if family.refused_weights is None:
            shares = Choice(torch.ones_like(rows, dtype=torch.float32), rows)
            return weights_and_output(family, router, logits, output, shares, changed)
        if self.weights is None:
            raise UnsupportedModelError(
                f"{layer_label(self.name)} of family {family.name!r}: {family.refused_weights}; "
                'replay with weights="recorded"'
            )
        return torch.zeros_like(rows, dtype=torch.float32), output


def live_choice(family: RouterFamily, output: Any, k: int, experts: int) -> Choice:
    """Return weights, with their gradient, and experts of a router's own choice.

    A skip class, where the family has one, is its highest expert number.
    """
    weights, ids = family.layout.choice(output, k)
    if family.skip_class:
        ids = ids.masked_fill(weights.detach() == 0, experts - 1)
    return Choice(weights, ids.long())


def _recorded_weights(
    ids: Int[Tensor, "tokens k"], weights: Tensor, experts: Int[Tensor, "tokens k"]
) -> Tensor:
    """Return the recorded weight of each expert; 0 for one that the record does not have."""
    same = experts[:, :, None] == ids[:, None, :]
    ordered = weights.gather(1, same.byte().argmax(dim=2))
    return ordered.masked_fill(~same.any(dim=2), 0)


def _replayed_rows(record: LayerTrace, only: str | float | None) -> Bool[Tensor, " rows"]:
    """Rows of the record that are replayed."""
    if only is None:
        return torch.ones(len(record.experts), dtype=torch.bool, device=record.experts.device)
    require(
        record.has_gaps,
        f"{layer_label(record.name)} has no scores beside the threshold: near ties cannot be told",
        TraceError,
    )
    if only == "near-ties":
        assert record.scores is not None
        finite = record.scores[record.scores.isfinite()]
        return record.gap < NEAR * float(finite.abs().max())
    number = isinstance(only, int | float) and not isinstance(only, bool) and only > 0
    if not number:
        raise ParameterError(f'only is "near-ties" or a gap above 0, got {only!r:.40}')
    return record.gap < float(only)


RANKING = ("topk", "sort", "argsort", "kthvalue", "max", "argmax", "one_hot", "nonzero")
"""Operations whose outputs a choice is read from."""


def choice_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save what ranks scores; prefer to repeat everything else."""
    packet = getattr(operation, "overloadpacket", operation)
    saved = any(packet is getattr(torch.ops.aten, name, None) for name in RANKING)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def saved_choice_contexts() -> tuple[Any, Any]:
    """Return the contexts of `torch.utils.checkpoint.checkpoint(..., context_fn=...)`.

    A checkpointed layer runs its router twice. If the second run flips a token, by another kernel
    or by state that moved in between, experts get other numbers of tokens, and PyTorch raises a
    `CheckpointError` or gradients belong to another choice. These contexts save the choice.
    """
    return create_selective_checkpoint_contexts(choice_policy)
