"""Groups of compared tokens in which a fault may show: documents, positions, ids, experts."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

GroupKind = Literal[
    "all",
    "first position",
    "last position",
    "positions",
    "document",
    "batch row",
    "decode",
    "token",
    "rare tokens",
    "expert",
    "row",
]
"""Kinds of groups of tokens, or of the scores of one expert ("row")."""
Sums = Float[np.ndarray, "groups clusters"]
FEWEST_DOCUMENTS = 12
"""Fewest documents that are clusters; fewer are split into stretches."""
FREQUENT_IDS = 8
"""Number of most frequent token ids that are groups of their own."""
MOST_RARE_TOKENS = 2
"""Most tokens of a rare id."""


class ComparedTokens(NamedTuple):
    """The compared tokens.

    Attributes:
        documents: document of each token.
        positions: position of each token in its document.
        ids: token ids; None if unknown.
        chosen: by layer, the experts that A chose; empty if single scores are the tokens.
        scored: by layer, the experts whose scores A recorded.
        batch_rows: row of each token in its batch of B; None if unknown.
        decoded: whether B decoded the token, one at a time; None if unknown.
        equal_scores: by layer, the number of tokens with the same scores in A; empty if unknown.
    """

    documents: Int[np.ndarray, " tokens"]
    positions: Int[np.ndarray, " tokens"]
    ids: Int[np.ndarray, " tokens"] | None
    chosen: Sequence[Int[np.ndarray, "tokens k"]]
    scored: Sequence[Int[np.ndarray, "tokens ranks"]]
    batch_rows: Int[np.ndarray, " tokens"] | None = None
    decoded: Bool[np.ndarray, " tokens"] | None = None
    equal_scores: Sequence[Int[np.ndarray, " tokens"]] = ()

    def with_scores_as_tokens(self) -> "ComparedTokens":
        """The tokens with each score as a token of its own."""
        ranks = self.scored[0].shape[1]
        documents, positions = (np.repeat(x, ranks) for x in (self.documents, self.positions))
        return ComparedTokens(documents, positions, None, (), self.scored)


class TokenGroups:
    """Groups of tokens of one layer, as pairs (group, token), with the clusters of the tokens."""

    def __init__(
        self, tokens: ComparedTokens, layer: int, clusters: Int[np.ndarray, " tokens"]
    ) -> None:
        self.names: list[tuple[GroupKind, int | None]] = []
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self.are_rows = not tokens.chosen
        if self.are_rows:
            self._add_group_per_number("row", tokens.scored[layer].reshape(-1, 1))
        else:
            self._add_token_groups(tokens, layer)
        self.group, self.token = (np.concatenate(x) for x in zip(*self._pairs, strict=True))
        self._shape = len(self.names), int(clusters.max()) + 1
        self._cells = self.group * self._shape[1] + clusters[self.token]

    def _add_token_groups(self, tokens: ComparedTokens, layer: int) -> None:
        """Add all groups except single rows of a router."""
        self._add_group("all", np.ones(len(tokens.documents), dtype=bool))
        self._add_group("first position", tokens.positions == 0)
        last = np.zeros(len(tokens.documents), dtype=bool)
        order = np.lexsort((tokens.positions, tokens.documents))
        last[order[np.flatnonzero(np.diff(tokens.documents[order], append=-1))]] = True
        self._add_group("last position", last)
        octave = np.log2(tokens.positions + 1).astype(int)
        for number in np.unique(octave[octave > 0]).tolist():
            self._add_group("positions", octave == number, 2**number - 1)
        self._add_group_per_number("document", tokens.documents[:, None])
        if tokens.batch_rows is not None:
            self._add_group_per_number("batch row", tokens.batch_rows[:, None])
        if tokens.decoded is not None:
            self._add_group("decode", tokens.decoded)
        if tokens.ids is not None:
            numbers, codes, counts = np.unique(tokens.ids, return_inverse=True, return_counts=True)
            self._add_group("rare tokens", counts[codes] <= MOST_RARE_TOKENS)
            for index in np.argsort(-counts, kind="stable")[:FREQUENT_IDS].tolist():
                self._add_group("token", codes == index, int(numbers[index]))
        if layer > 0:
            self._add_group_per_number("expert", tokens.chosen[layer - 1])

    def _add_group(self, kind: GroupKind, members: np.ndarray, number: int | None = None) -> None:
        """Add one group of tokens by its mask."""
        rows = np.flatnonzero(members)
        self._pairs.append((np.full(len(rows), len(self.names)), rows))
        self.names.append((kind, number))

    def _add_group_per_number(self, kind: GroupKind, columns: np.ndarray) -> None:
        """Add a group of rows for each number that occurs in a table."""
        numbers, codes = np.unique(columns, return_inverse=True)
        rows = np.repeat(np.arange(len(columns)), columns.shape[1])
        self._pairs.append((codes.ravel() + len(self.names), rows))
        self.names.extend((kind, int(number)) for number in numbers)

    def cluster_sums(self, values: np.ndarray) -> Sums:
        """Sum of the values over each group in each cluster."""
        weights, cells = values[self.token], math.prod(self._shape)
        return np.bincount(self._cells, weights=weights, minlength=cells).reshape(self._shape)

    def tokens_in(self, numbers: Sequence[int]) -> np.ndarray:
        """Mask of the tokens in any of these groups."""
        inside = np.zeros(int(self.token.max()) + 1, dtype=bool)
        inside[self.token[np.isin(self.group, numbers)]] = True
        return inside


def token_clusters(tokens: ComparedTokens) -> Int[np.ndarray, " tokens"]:
    """Number of each token's cluster: its document, or a stretch of it if documents are few."""
    codes = np.unique(tokens.documents, return_inverse=True)[1]
    stretches = -(-FEWEST_DOCUMENTS // (int(codes.max()) + 1))
    return codes * stretches + tokens.positions * stretches // (int(tokens.positions.max()) + 1)


def prefix_repeats(tokens: ComparedTokens) -> Int[np.ndarray, " tokens"]:
    """Number of tokens with the same prefix, which are one draw, as after a common prompt."""
    if tokens.ids is None:
        return np.ones(len(tokens.documents), dtype=np.int64)
    order = np.lexsort((tokens.positions, tokens.documents))
    prefixes: dict[tuple[int, int, int], int] = {}
    numbers = np.empty(len(order), dtype=np.int64)
    document, prefix = -1, -1
    columns = (x[order].tolist() for x in (tokens.documents, tokens.positions, tokens.ids))
    for row, document_of_row, *token in zip(order.tolist(), *columns, strict=True):
        if document_of_row != document:
            document, prefix = document_of_row, -1
        key = prefix, *token
        prefix = numbers[row] = prefixes.setdefault(key, len(prefixes))
    return np.bincount(numbers)[numbers]
