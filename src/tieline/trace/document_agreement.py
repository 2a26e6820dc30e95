"""Routes against a reference document by document: requests exchanged, shifted, or of another text.

For a document the row of each token shares o_t of its L·k ids with the reference's row of that
token. An alternative (the reference's rows of another document, or of the token some places on)
shares a_t. Only tokens at which a_t ≠ o_t count: under a sound assignment a_t > o_t is no likelier
than a_t < o_t even for twins, so an alternative that wins 3 of 4 of them, with P(Binomial(n, 1/2) ≥
wins) < 10⁻⁴, and agrees from 0.5 on beyond chance, is where the rows belong. Sixteen tokens that
differ suffice.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

from tieline.trace.soundness import RouteFinding

AGREES = 0.5
LEAST_WINS, LEVEL = 0.75, 1e-4
LEAST_TOKENS = 16
SHIFTS = tuple(shift for n in range(1, 9) for shift in (-n, n))
MOST_LAYERS, MOST_TOKENS, MOST_DOCUMENTS = 8, 256, 64


class Document(NamedTuple):
    """Rows of one document on both sides, in the order of positions.

    Attributes:
        number: its number.
        ours: ids (tokens, layers, k) of the file.
        theirs: ids of the reference.
    """

    number: int
    ours: np.ndarray
    theirs: np.ndarray


class _Move(NamedTuple):
    """Where the rows of a document belong: another document, a shift, or nowhere (both None)."""

    number: int
    other: int | None
    shift: int | None
    gain: float


def shared_ids(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return how many ids the rows (tokens, layers, k) of a and b share, over all layers."""
    return (a[..., :, None] == b[..., None, :]).sum((1, 2, 3))


def split_documents(ours: np.ndarray, theirs: np.ndarray, documents: np.ndarray) -> list[Document]:
    """Return the first rows of each document, of some layers.

    Args:
        ours: ids (rows, layers, k) of the file, by document and position.
        theirs: ids of the reference at the same tokens.
        documents: document of each row.
    """
    layers = np.unique(np.linspace(0, ours.shape[1] - 1, MOST_LAYERS).astype(int))
    numbers = np.unique(documents)
    chosen = np.unique(np.linspace(0, len(numbers) - 1, MOST_DOCUMENTS).astype(int))
    rows = [(int(n), np.flatnonzero(documents == n)[:MOST_TOKENS]) for n in numbers[chosen]]
    return [Document(n, ours[index][:, layers], theirs[index][:, layers]) for n, index in rows]


def documents_astray(documents: list[Document]) -> Iterator[RouteFinding]:
    """Report documents whose rows are those of another, of neighbouring tokens, or of no document.

    Args:
        documents: at least two; see `split_documents`.
    """
    chance = _chance(documents)
    agreements = {x.number: _beyond(x.ours, x.theirs, chance) for x in documents}
    moves = [move for x in documents if (move := _best_move(x, documents, chance)) is not None]
    moved = {move.number for move in moves}
    usual = float(np.median(list(agreements.values())))
    strange = [
        x.number
        for x in documents
        if x.number not in moved
        and len(x.ours) >= LEAST_TOKENS
        and agreements[x.number] < AGREES / 2 <= AGREES <= usual
    ]
    total = len(documents)
    exchanged = [f"{move.number} → {move.other}" for move in moves if move.other is not None]
    if exchanged:
        yield _finding("exchanged-documents", exchanged, total, "exchanged-requests")
    for shift in sorted({move.shift for move in moves if move.shift is not None}):
        shifted = [str(move.number) for move in moves if move.shift == shift]
        yield _finding("shifted-documents", shifted, total, "cut-prompt", shift)
    if strange:
        yield _finding("strange-documents", list(map(str, strange)), total, "strange-requests")


def _finding(case: str, names: list[str], total: int, reason: str, shift: int = 0) -> RouteFinding:
    evidence = {"documents": names[:6], "shift": shift}
    return RouteFinding("token-shift", "unsound", case, len(names), total, reason, evidence)


def _chance(documents: list[Document]) -> float:
    """Mean share of ids that rows of independent tokens have in common."""
    ours = np.concatenate([x.ours for x in documents])
    theirs = np.concatenate([x.theirs for x in documents])
    size, shares = int(max(ours.max(), theirs.max())) + 1, []
    for layer in range(ours.shape[1]):
        loads = [np.bincount(x[:, layer].clip(0).ravel(), minlength=size) for x in (ours, theirs)]
        shares.append(float(loads[0] @ loads[1]) / len(ours) ** 2 / ours.shape[2])
    return float(np.mean(shares))


def _beyond(a: np.ndarray, b: np.ndarray, chance: float) -> float:
    """Agreement of rows, 0 for chance and 1 for equality."""
    share = float(shared_ids(a, b).mean()) / (a.shape[1] * a.shape[2])
    return (share - chance) / max(1 - chance, 1e-9)


def _best_move(document: Document, documents: list[Document], chance: float) -> _Move | None:
    own = shared_ids(document.ours, document.theirs)
    if bool((own == document.ours.shape[1] * document.ours.shape[2]).all()):
        return None
    moves = []
    for other in documents:
        if other.number != document.number:
            count = min(len(own), len(other.theirs))
            gain = _gain(document.ours[:count], own[:count], other.theirs[:count], chance)
            moves += [] if gain is None else [_Move(document.number, other.number, None, gain)]
    for shift in SHIFTS:
        first, last = max(0, -shift), min(len(own), len(own) - shift)
        if last - first >= LEAST_TOKENS // 2:
            rows = document.theirs[first + shift : last + shift]
            gain = _gain(document.ours[first:last], own[first:last], rows, chance)
            moves += [] if gain is None else [_Move(document.number, None, shift, gain)]
    return max(moves, key=lambda move: move.gain, default=None)


def _gain(
    ours: np.ndarray, own: np.ndarray, alternative: np.ndarray, chance: float
) -> float | None:
    """Mean ids more that the alternative shares; None if the rows do not belong there."""
    other = shared_ids(ours, alternative)
    wins, losses = int((other > own).sum()), int((other < own).sum())
    if wins < LEAST_WINS * (wins + losses) or wins == 0:
        return None
    if float(binom.sf(wins - 1, wins + losses, 0.5)) > LEVEL:
        return None
    return float((other - own).mean()) if _beyond(ours, alternative, chance) >= AGREES else None
