"""Compare rows with the token ids of the same file, without a model: equal tokens choose alike.

    lag                   all rows belong to tokens a few positions on
    exchanged, shifted    rows of a document fit tokens of another, or tokens a few positions on
    unrelated             rows do not depend on the token ids
    padding-shown         documents begin or end with runs of a token that occurs nowhere else

**Profiles.** P_w(e) is the share of the rows of token w, in other documents, that chose expert e. A
row with the choice S fits token w with

    f(S, w) = Σ_{e ∈ S} P_w(e) / k,

averaged over the first two routed layers, which depend most on the token. For every document the
fit with its own tokens is compared with the fit with another document's tokens, and with its own
tokens shifted, at the positions at which they differ; positions that pair the same two tokens count
as one draw, their mean, since a loop proves no more than its first round. The rows belong to an
alternative that wins at 3 of 4 draws, with a sign test at 1 % over all alternatives of all
documents. For two documents a and b that may be exchanged, profiles of the other documents give

    f(S_a, w_b) + f(S_b, w_a) - f(S_a, w_a) - f(S_b, w_b)

at each position, in which popular experts and tokens cancel, so that the sign test suffices. For a
token that no other document has, the fit is that of an average row, by the load of the experts, and
all such tokens count as one.

**Unrelated rows.** The fit with the own tokens minus that with tokens of the same document in
random order has mean zero if rows do not depend on tokens. Reported if its upper limit (four
standard errors, clustered by document) is below a tenth of the value for full dependence, and its
mean is not above zero by Student's test at 0.5 %: with weakly dependent rows the file is sound.
"""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student_t

from tieline.trace.readers.routes import Routes
from tieline.trace.reference_agreement import (
    LEAST_WINS,
    SHIFTS,
    DocumentMove,
    moved_document_findings,
    significant_gain,
)
from tieline.trace.route_table import RouteTable, route_table, row_hashes
from tieline.trace.soundness import RouteFinding

LARGEST_LAG = 8
MOST_ROWS, MOST_DOCUMENTS, MOST_TOKENS = 1 << 14, 64, 256
FAMILY_LEVEL = 0.01
"""Probability of a false finding in a file, over all alternatives of all documents."""
LEAST_FITTED_ROWS = 256
CHANCE_LEVEL = 0.005
"""Level of the test that rows depend on their tokens."""
LARGEST_UNRELATED_SHARE = 0.1
"""Share of full dependence below which rows do not depend on the tokens."""
BLOCK_ROWS = 64
"""Rows that count as a document if the file has fewer than four documents."""
PERMUTATIONS = 8
LEAST_PADDING = 8


def token_fit_findings(routes: Routes, n_experts: int | None = None) -> list[RouteFinding]:
    """Check rows against their token ids.

    Args:
        routes: routes as a reader returns them; without token ids there are no findings.
        n_experts: number of experts E, if it is known.
    """
    table, tokens = route_table(routes, n_experts), routes.tokens
    if tokens is None or bool((tokens < 0).any()) or not table.layers:
        return []
    shifted = list(_lag_findings(table, tokens))
    fits = [] if shifted else list(_misfit_findings(table, tokens))
    return [*shifted, *fits, *_padding_findings(table, tokens)]


class TokenProfiles(NamedTuple):
    """How often the rows of each token chose each expert.

    Attributes:
        ids: chosen experts (rows, layers, k).
        tokens: each row's token as an index 0 ... U - 1 of the U distinct tokens.
        documents: document of each row.
        counts: number of rows of each token (U,).
        chosen: number of rows of each token that chose each expert (layers, U, E).
    """

    ids: np.ndarray
    tokens: np.ndarray
    documents: np.ndarray
    counts: np.ndarray
    chosen: np.ndarray

    @classmethod
    def from_choices(
        cls, ids: np.ndarray, tokens: np.ndarray, documents: np.ndarray
    ) -> "TokenProfiles":
        """Count the choices of each token; ids (rows, layers, k), a token and document per row."""
        numbers = np.unique(tokens, return_inverse=True)[1]
        counts = np.bincount(numbers)
        return cls(
            ids,
            numbers,
            documents,
            counts,
            _choice_counts(ids, numbers, len(counts), int(ids.max()) + 1),
        )

    def average_fit(self) -> np.ndarray:
        """Return the fit (rows,) of each row with an unknown token, by the load of its experts."""
        layers = self.ids.shape[1]
        loads = self.chosen.sum(1) / len(self.ids)
        chosen_loads = [loads[layer][self.ids[:, layer]] for layer in range(layers)]
        return np.stack(chosen_loads).mean((0, 2))

    def without_document(self, document: int) -> "TokenCounts":
        """Return the profiles from all documents but this one."""
        inside = self.documents == document
        size = len(self.counts)
        counts = self.counts - np.bincount(self.tokens[inside], minlength=size)
        chosen = self.chosen - _choice_counts(
            self.ids[inside], self.tokens[inside], size, self.chosen.shape[2]
        )
        return TokenCounts(counts, chosen)

    def without_documents(
        self, documents: tuple[int, ...], vocabulary: np.ndarray
    ) -> "TokenCounts":
        """Return the profiles of the tokens of a vocabulary, from all but these documents."""
        positions = np.full(len(self.counts), -1)
        positions[vocabulary] = np.arange(len(vocabulary))
        rows = np.flatnonzero(np.isin(self.documents, documents) & (positions[self.tokens] >= 0))
        numbers, size = positions[self.tokens[rows]], len(vocabulary)
        counts = self.counts[vocabulary] - np.bincount(numbers, minlength=size)
        chosen = _choice_counts(self.ids[rows], numbers, size, self.chosen.shape[2])
        return TokenCounts(counts, self.chosen[:, vocabulary] - chosen)


class TokenCounts(NamedTuple):
    """Profiles from some documents: rows of each token (U,), and by expert (layers, U, E)."""

    counts: np.ndarray
    chosen: np.ndarray

    def fit(self, ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the fit f (n,) of rows with tokens; NaN for tokens without rows.

        Args:
            ids: chosen experts (n, layers, k).
            tokens: token index (n,) to compare each row with.
        """
        layers, k = ids.shape[1:]
        shared = sum(
            self.chosen[layer, tokens[:, None], ids[:, layer]].sum(1) for layer in range(layers)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            rows_of_token = self.counts[tokens]
            return np.where(rows_of_token > 0, shared / rows_of_token / (k * layers), np.nan)


def _choice_counts(ids: np.ndarray, tokens: np.ndarray, size: int, experts: int) -> np.ndarray:
    """Return the number of rows of each token that chose each expert (layers, size, E)."""
    cells = tokens[:, None, None] * experts + ids
    counts = [np.bincount(x.ravel(), minlength=size * experts) for x in cells.swapaxes(0, 1)]
    return np.stack(counts).reshape(-1, size, experts).astype(np.float32)


def _misfit_findings(table: RouteTable, tokens: np.ndarray) -> Iterator[RouteFinding]:
    """Report documents whose rows fit other tokens better, or rows that do not depend on tokens."""
    layers = list(table.layers[:2])
    written = table.routed.mask[:, layers].all(1) & (table.experts[:, layers] >= 0).all((1, 2))
    rows = np.flatnonzero(written)[:MOST_ROWS]
    small = (
        len(rows) < LEAST_FITTED_ROWS or int(table.experts[rows][:, layers].max(initial=0)) > 4096
    )
    if small:
        return
    ids = table.experts[rows][:, layers].astype(np.int64)
    documents = table.documents[rows]
    if len(np.unique(documents)) >= 4:
        profiles = TokenProfiles.from_choices(ids, tokens[rows], documents)
        moves = list(_document_moves(profiles))
        yield from moved_document_findings(moves, len(np.unique(documents)))
        if moves:
            return
    else:
        profiles = TokenProfiles.from_choices(ids, tokens[rows], np.arange(len(rows)) // BLOCK_ROWS)
    yield from _unrelated_row_findings(profiles)


def _document_moves(profiles: TokenProfiles) -> Iterator[DocumentMove]:
    """Yield the best alternative of each document whose rows fit other tokens better."""
    numbers = np.unique(profiles.documents)[:MOST_DOCUMENTS]
    rows = {int(n): np.flatnonzero(profiles.documents == n)[:MOST_TOKENS] for n in numbers}
    level = FAMILY_LEVEL / (len(rows) * (1.5 * (len(rows) - 1) + len(SHIFTS)))
    moves = [move for number in rows for move in _moves_of_document(profiles, number, rows, level)]
    moves += _exchange_moves(profiles, rows, level)
    for number in rows:
        alternatives = [move for move in moves if move.number == number]
        if alternatives:
            yield max(alternatives, key=lambda move: move.gain)


def _exchange_moves(
    profiles: TokenProfiles, rows: dict[int, np.ndarray], level: float
) -> Iterator[DocumentMove]:
    """Yield both moves of each pair of documents whose rows fit better after an exchange."""
    average_fit = profiles.average_fit()
    for pair in combinations(rows, 2):
        count = min(len(rows[number]) for number in pair)
        both = np.stack([rows[number][:count] for number in pair])
        vocabulary, tokens = np.unique(profiles.tokens[both], return_inverse=True)
        others = profiles.without_documents(pair, vocabulary)
        tokens = tokens.reshape(2, count)
        gains = _exchange_gains(others, profiles.ids[both], tokens, average_fit[both])
        gain = significant_gain(gains, level, least_wins=0.5)
        if gain is not None:
            yield from (DocumentMove(x, y, None, gain / 2) for x, y in (pair, pair[::-1]))


def _exchange_gains(
    others: TokenCounts, ids: np.ndarray, tokens: np.ndarray, average_fit: np.ndarray
) -> np.ndarray:
    """Return the gain in fit from exchanging two documents, one number per draw.

    Args:
        others: profiles of all other documents.
        ids: chosen experts of both (2, n, layers, k).
        tokens: their tokens (2, n).
        average_fit: fit (2, n) of their rows with unknown tokens.
    """
    unknown = others.counts[tokens] == 0
    fits = np.stack([[others.fit(rows, stated) for stated in tokens] for rows in ids])
    fits = np.where(unknown, average_fit[:, None], fits)
    compared = (tokens[0] != tokens[1]) & ~unknown.all(0)
    gains = (fits[0, 1] + fits[1, 0] - fits[0, 0] - fits[1, 1])[compared]
    return _mean_by_draw(gains, np.where(unknown, -1, tokens)[:, compared])


def _mean_by_draw(gains: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the mean gain of the positions that have equal keys (keys, positions)."""
    draw = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
    return np.bincount(draw, gains) / np.bincount(draw)


def _moves_of_document(
    profiles: TokenProfiles, number: int, rows: dict[int, np.ndarray], level: float
) -> Iterator[DocumentMove]:
    """Yield the alternatives that fit the rows of one document better."""
    ids, stated = profiles.ids[rows[number]], profiles.tokens[rows[number]]
    others = profiles.without_document(number)
    stated_fit = others.fit(ids, stated)
    for other in rows:
        tokens = profiles.tokens[rows[other]][: len(stated)]
        count = len(tokens)
        other_fit = others.fit(ids[:count], tokens)
        gain = _fit_gain(stated_fit[:count], other_fit, np.stack([stated[:count], tokens]), level)
        if gain is not None:
            yield DocumentMove(number, other, None, gain)
    for shift in SHIFTS:
        first, last = max(0, -shift), max(0, min(len(stated), len(stated) - shift))
        moved, span = stated[max(0, shift) : max(0, shift) + last - first], slice(first, last)
        pairs = np.stack([stated[span], moved])
        gain = _fit_gain(stated_fit[span], others.fit(ids[span], moved), pairs, level)
        if gain is not None:
            yield DocumentMove(number, None, shift, gain)


def _fit_gain(
    stated_fit: np.ndarray,
    other_fit: np.ndarray,
    pairs: np.ndarray,
    level: float,
) -> float | None:
    """Return the mean gain in fit of an alternative; None if it does not pass the test.

    Args:
        stated_fit: fit of the rows with the stated tokens.
        other_fit: fit of the rows with the tokens of the alternative.
        pairs: stated and alternative tokens (2, n).
        level: level of the test.
    """
    compared = (pairs[0] != pairs[1]) & np.isfinite(stated_fit) & np.isfinite(other_fit)
    gains = _mean_by_draw((other_fit - stated_fit)[compared], pairs[:, compared])
    return significant_gain(gains, level, LEAST_WINS)


def _unrelated_row_findings(profiles: TokenProfiles) -> Iterator[RouteFinding]:
    """Report rows whose choices do not depend on their tokens."""
    rng, gains, fitted = np.random.default_rng(0), [], 0
    for number in np.unique(profiles.documents)[:MOST_DOCUMENTS]:
        rows = np.flatnonzero(profiles.documents == number)[:MOST_TOKENS]
        tokens = profiles.tokens[rows]
        others, ids = profiles.without_document(int(number)), profiles.ids[rows]
        stated_fit = others.fit(ids, tokens)
        orders = [rng.permutation(tokens) for _ in range(PERMUTATIONS)]
        other = np.array([others.fit(ids, order) for order in orders])
        fitted_rows = np.isfinite(stated_fit) & np.isfinite(other).any(0)
        fitted += int(fitted_rows.sum())
        if fitted_rows.any():
            gains.append(
                float((stated_fit[fitted_rows] - np.nanmean(other[:, fitted_rows], 0)).mean())
            )
    if fitted < LEAST_FITTED_ROWS or len(gains) < 4:
        return
    loads = profiles.chosen.sum(1) / len(profiles.ids)
    full = 1 - float((loads**2).sum(1).mean()) / profiles.ids.shape[2]
    mean, error = float(np.mean(gains)), float(np.std(gains, ddof=1)) / math.sqrt(len(gains))
    related = mean > float(student_t.ppf(1 - CHANCE_LEVEL, len(gains) - 1)) * error
    if full < 0.05 or related or mean + 4 * error > LARGEST_UNRELATED_SHARE * full:
        return
    evidence = {"agreement": mean / full, "limit": (mean + 4 * error) / full, "fitted": fitted}
    count = len(profiles.ids)
    yield RouteFinding(
        "token-shift", "unsound", "unrelated", count, count, "other-token-ids", evidence
    )


def _lag_findings(table: RouteTable, tokens: np.ndarray) -> Iterator[RouteFinding]:
    """Report rows that match the tokens better at another lag."""
    k = table.experts.shape[2]
    if len(tokens) < LEAST_FITTED_ROWS:
        return
    tokens, documents = tokens[: 1 << 17], table.documents[: 1 << 17]
    column = np.sort(table.experts[: 1 << 17, table.layers[0]], axis=1)
    codes = np.unique(row_hashes(column), return_inverse=True)[1]
    written = table.routed.mask[: 1 << 17, table.layers[0]]
    _, shares = np.unique(codes, return_counts=True)
    chance = float(((shares / shares.sum()) ** 2).sum())
    agreement = {
        lag: _agreement_at_lag(tokens, codes, documents, written, lag)
        for lag in range(-LARGEST_LAG, LARGEST_LAG + 1)
    }
    unshifted_share, pairs = agreement[0]
    best = max(agreement, key=lambda lag: agreement[lag][0])
    error = math.sqrt(max(chance, 1e-3) / max(pairs, 1))
    gain, unshifted = agreement[best][0] - chance, unshifted_share - chance
    if best == 0 or pairs < 128 or gain < 8 * error or unshifted > 0.5 * gain:
        return
    evidence = {
        "shift": -best,
        "lag": best,
        "shifted": agreement[best][0],
        "unshifted": unshifted_share,
        "chance": chance,
        "layer": table.routes.names[table.layers[0]],
        "k": k,
    }
    yield RouteFinding(
        "token-shift", "unsound", "lag", len(tokens), len(tokens), "neighbouring-rows", evidence
    )


def _agreement_at_lag(
    tokens: np.ndarray, codes: np.ndarray, documents: np.ndarray, written: np.ndarray, lag: int
) -> tuple[float, int]:
    """Return the share of pairs of equal tokens that choose alike if row t is of token t + lag.

    A mean over repeated tokens, weighted by their number of rows, so that a run of one token does
    not outweigh all others. Also returns the number of rows of repeated tokens.
    """
    length = len(tokens)
    rows = np.arange(max(0, -lag), min(length, length - lag))
    rows = rows[(documents[rows] == documents[rows + lag]) & written[rows]]
    if len(rows) < 2:
        return 0.0, 0
    names = np.unique(tokens[rows + lag], return_inverse=True)[1].astype(np.int64)
    counts = np.bincount(names).astype(float)
    pairs, same = np.unique(names * (int(codes.max()) + 1) + codes[rows], return_counts=True)
    owner = pairs // (int(codes.max()) + 1)
    agreed = np.bincount(owner, same * (same - 1.0), minlength=len(counts))
    repeated = counts > 1
    share = agreed[repeated] / (counts[repeated] - 1)  # n · P(two of them choose alike)
    total = float(counts[repeated].sum())
    return (float(share.sum()) / total if total else 0.0), int(total)


def _padding_findings(table: RouteTable, tokens: np.ndarray) -> Iterator[RouteFinding]:
    """Report documents of equal length that begin or end with padding, as runs of one token.

    The runs of several documents have different lengths, or the token occurs nowhere else. One
    document alone may be cut at a rule of dashes.
    """
    documents = np.split(tokens, np.flatnonzero(np.diff(table.documents)) + 1)
    if len(documents) < 2 or len({len(ids) for ids in documents}) > 1:
        return
    for side, step in (("begin", 1), ("end", -1)):
        edges = [ids[::step] for ids in documents]
        runs = [int((ids != ids[0]).argmax()) if (ids != ids[0]).any() else 0 for ids in edges]
        padded = [n for n, run in enumerate(runs) if run >= LEAST_PADDING]
        if not padded or len({int(edges[n][0]) for n in padded}) > 1 or len(set(runs)) == 1:
            continue
        token = int(edges[padded[0]][0])
        rows = sum(runs[n] for n in padded)
        if len(padded) >= 2 or int((tokens == token).sum()) == rows:
            evidence = {"side": side, "token": token, "document": padded[0], "rows": rows}
            count, total = len(padded), len(documents)
            severity = "unsound" if count > 1 else "suspicious"
            yield RouteFinding(
                "row-count", severity, "padding-shown", count, total, "mask-of-ones", evidence
            )
