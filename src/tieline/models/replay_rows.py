"""The row of a record that belongs to each token of a forward pass.

    OrderedRows    the i-th document of all passes takes the i-th document of the record
    MatchedRows    a document takes the document of the record whose tokens agree, in any order

A document matches a recorded one if they agree on all tokens that both have, so that either may be
the beginning of the other: an engine records no route of the last token that it samples, and a
pass may hold a prompt alone. Of several, the longest agreement is taken, then the one of the same
length; recorded documents of equal tokens, or of equal routes where they agree, count as one, the
first of them. Routes of a causal model depend on the tokens before alone, so that a shorter
agreement gives right routes for its part. What remains ambiguous is refused.

Agreements are found by sums over the tokens t_j of a mixing function h,

    H_i = Σ_{j <= i} h(t_j, j)    modulo 2^64,

of all records at once, and then compared token by token.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.core.errors import TielineError, TraceError, require
from tieline.models.documents import Batch
from tieline.trace.record import LayerTrace, RoutingTrace

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

    def of(self, batch: Batch) -> Int[Tensor, " tokens"]:
        """Return the row of each token of a batch; refuses token ids that differ."""
        rows = self.at(batch.documents, batch.positions)
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

    def at(self, documents: Tensor, positions: Tensor) -> Int[Tensor, " tokens"]:
        """Return the rows of places in the record, by the order of its documents."""
        count = len(self.starts) - 1
        inside = (documents >= 0) & (documents < count)
        document = documents.clamp(min=0, max=max(count - 1, 0))
        cell = self.starts[document] + positions
        inside &= cell < self.starts[document + 1]
        return torch.where(inside, self.cells[cell.clamp(max=len(self.cells) - 1)], -1)


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
        inside = np.arange(len(self._tokens)) - np.repeat(self._starts, self._lengths)
        sums = np.concatenate([[np.uint64(0)], _mixed_hash(self._tokens.numpy(), inside).cumsum()])
        self._sums = sums  # of all tokens before, the documents one after the other
        self._open: dict[int, list[int]] = {}

    def of(self, batch: Batch) -> Int[Tensor, " tokens"]:
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
        return self._order.at(matches, batch.positions)

    def _continued_tokens(self, batch: Batch) -> dict[int, np.ndarray]:
        """Tokens of each document of a batch, with those of the cache that it continues."""
        documents: dict[int, np.ndarray] = {}
        for number in batch.documents.unique().tolist():
            here = batch.documents == number
            before = self._open.get(number, [])[: int(batch.positions[here][0])]
            now = batch.tokens[here].tolist()
            documents[number] = np.array(before + now, dtype=np.int64)
        return documents

    def _matching_document(self, number: int, tokens: np.ndarray) -> int:
        """The recorded document of these tokens; -1 without one."""
        prefix = _mixed_hash(tokens, np.arange(len(tokens))).cumsum()
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
        start, length = self._starts[document], min(self._lengths[document], len(tokens))
        return bool((self._tokens[start : start + length].numpy() == tokens[:length]).all())

    def _check_single(self, number: int, length: int, candidates: list[int]) -> None:
        """Refuse candidates that go on otherwise and whose routes differ where they agree."""
        first, others = candidates[0], candidates[1:]
        others = [i for i in others if not self._equal_tokens(first, i)]
        if all(self._equal_routes(first, i, length) for i in others):
            return
        named = ", ".join(str(self._order.numbers[i]) for i in candidates[:MOST_NAMED])
        more = ", ..." * (len(candidates) > MOST_NAMED)
        raise TraceError(
            f"document {number} ({length} tokens) is the beginning of {len(candidates)} documents "
            f"of the record ({named}{more}) whose routes differ: replay whole documents, or a "
            "record of these"
        )

    def _equal_tokens(self, a: int, b: int) -> bool:
        slices = [
            self._tokens[self._starts[i] : self._starts[i] + self._lengths[i]] for i in (a, b)
        ]
        return torch.equal(*slices)

    def _equal_routes(self, a: int, b: int, length: int) -> bool:
        positions = torch.arange(length, device="cpu")
        rows = [self._order.at(torch.full_like(positions, i), positions) for i in (a, b)]
        for layer in self._layers:
            k = layer.facts.k
            one, other = (layer.experts[r, :k].sort(dim=1).values for r in rows)
            if not torch.equal(one, other):
                return False
        return True


def _mixed_hash(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A mixing function of token and position: splitmix64 of both."""
    with np.errstate(over="ignore"):
        x = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += positions.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
