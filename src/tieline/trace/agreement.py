"""Routes against a reference of the same tokens: which fault explains that they disagree.

The agreement of a layer of the file with a layer of the reference is the mean share of experts that
both chose, less what two independent choices of these loads would share, over what is left:

    a = (mean |S ∩ R| / k - c) / (1 - c),    c = Σ_e p_e q_e / k,

with p_e and q_e the shares of tokens that chose expert e on either side. It is 1 for equal choices
and 0 for choices that have nothing to do with each other. From 0.5 on (`AGREES`) two layers route
the same tokens of the same model, whatever precision did to them. If layers do not agree as they
stand, these explanations are tried in order, and the first that reaches it is named:

    layers in other places    the best assignment of layers (Hungarian algorithm)
    rows of other tokens      the row of the reference that each of 64 rows fits best
    physical ids              the renumbering of each layer's experts that agrees best

**Document by document**: requests exchanged, shifted, or of another text. The row of each token of
a document shares o_t of its L·k ids with the reference's row of that token. An alternative (the
reference's rows of another document, or of the token some places on) shares a_t. Only tokens at
which a_t ≠ o_t count: under a sound assignment a_t > o_t is no likelier than a_t < o_t even for
twins, so an alternative that wins 3 of 4 of them, with P(Binomial(n, 1/2) ≥ wins) < 10⁻⁴, and
agrees from 0.5 on beyond chance, is where the rows belong. Sixteen tokens that differ suffice.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import binom

from tieline.trace.readers.routes import Routes
from tieline.trace.soundness import RouteFinding, RouteTable, route_table

AGREES = 0.5
MOST_ROWS = 4096
PROBES = 64
DRIFT, LEAST_DRIFT_ROWS = 3.0, 64
"""Growth of the differing choices from the first to the last quarter of the positions that is told,
and rows that a quarter needs."""
LEAST_WINS, LEVEL = 0.75, 1e-4
LEAST_TOKENS = 16
SHIFTS = tuple(shift for n in range(1, 9) for shift in (-n, n))
MOST_LAYERS, MOST_TOKENS, MOST_DOCUMENTS = 8, 256, 64


def agreement_findings(
    routes: Routes, reference: Routes, n_experts: int | None = None
) -> list[RouteFinding]:
    """Return what explains that routes disagree with a reference of the same tokens.

    Args:
        routes: the routes to judge; without documents and positions, rows stand in the order of
            the reference.
        reference: routes of the same tokens that are right: of a model, or of another file.
        n_experts: number of experts.
    """
    ours, theirs = route_table(routes, n_experts), route_table(reference, n_experts)
    rows, other = _common_rows(routes, reference)
    mask = _fully_written_rows(ours, rows) & _fully_written_rows(theirs, other)
    every = rows[mask], other[mask]
    rows, other = every[0][:MOST_ROWS], every[1][:MOST_ROWS]
    if len(rows) == 0 or not ours.layers or not theirs.layers:
        return []
    if routes.experts.shape[2] != reference.experts.shape[2]:
        return [_different_k_finding(routes, reference)]
    a = routes.experts[rows][:, ours.layers]
    b = reference.experts[other][:, theirs.layers]
    drift = list(_position_drift(a, b, ours, rows))
    astray = list(_astray_documents(ours, theirs, every))
    return astray or [*_explained_disagreement(a, b, ours, theirs, reference), *drift]


def _astray_documents(
    ours: RouteTable, theirs: RouteTable, rows: tuple[np.ndarray, np.ndarray]
) -> Iterator[RouteFinding]:
    """Report documents whose rows belong elsewhere; nothing if all are shifted alike."""
    documents = ours.documents[rows[0]]
    if len(ours.layers) != len(theirs.layers) or len(np.unique(documents)) < 2:
        return
    positions = ours.routes.positions
    keys = (rows[0] if positions is None else positions[rows[0]], documents)
    order = np.lexsort(keys)
    left = ours.experts[rows[0][order]][:, ours.layers]
    right = theirs.experts[rows[1][order]][:, theirs.layers]
    findings = list(documents_astray(split_documents(left, right, documents[order])))
    if all(x.count < x.total or x.case == "exchanged-documents" for x in findings):
        yield from findings


def _position_drift(
    a: np.ndarray, b: np.ndarray, ours: RouteTable, rows: np.ndarray
) -> Iterator[RouteFinding]:
    """Report differing choices that grow along the positions, as with other rotary tables.

    Rounding changes about as many choices late as early; a wrong position table changes more the
    further a token is from the first. Layers that agree beforehand are judged together.
    """
    if a.shape[1] != b.shape[1]:
        return
    positions = ours.routes.positions
    at = rows if positions is None else positions[rows]
    differing = 1 - shared_ids(a, b) / (a.shape[1] * a.shape[2])
    quarters = np.quantile(at, [0.25, 0.75])
    early, late = differing[at <= quarters[0]], differing[at >= quarters[1]]
    if min(len(early), len(late)) < LEAST_DRIFT_ROWS or float(differing.mean()) > AGREES / 2:
        return
    first, last = float(early.mean()), float(late.mean())
    error = math.sqrt(float(early.var()) / len(early) + float(late.var()) / len(late))
    ratio = last / max(first, 0.5 / (len(early) * a.shape[1] * a.shape[2]))
    if last - first < 6 * error or ratio < DRIFT:
        return
    evidence = {"early": first, "late": last, "ratio": ratio}
    yield RouteFinding(
        "token-shift",
        "suspicious",
        "position-drift",
        len(late),
        len(a),
        "position-tables",
        evidence,
    )


def _fully_written_rows(table: RouteTable, rows: np.ndarray) -> np.ndarray:
    """Mask of rows that are routed in every layer with experts."""
    return np.asarray(table.routed.mask[rows][:, list(table.layers)].all(1))


def _different_k_finding(routes: Routes, reference: Routes) -> RouteFinding:
    """Report that file and reference choose other numbers of experts."""
    evidence = {"k": routes.experts.shape[2], "expected": reference.experts.shape[2]}
    rows = len(routes.experts)
    return RouteFinding("layer-shift", "unsound", "other-k", rows, rows, "other-shape", evidence)


def _common_rows(routes: Routes, reference: Routes) -> tuple[np.ndarray, np.ndarray]:
    """Rows of both that belong to the same document and position."""
    if routes.positions is None or reference.positions is None:
        count = min(len(routes.experts), len(reference.experts))
        return np.arange(count), np.arange(count)
    keys = []
    for run in (routes, reference):
        documents = run.documents
        documents = np.zeros(len(run.experts), np.int64) if documents is None else documents
        assert run.positions is not None
        keys.append(documents.astype(np.int64) << 40 | run.positions.astype(np.int64))
    _, ours, theirs = np.intersect1d(keys[0], keys[1], return_indices=True)
    order = np.argsort(ours)
    return ours[order], theirs[order]


def _choice_masks(ids: np.ndarray, size: int) -> np.ndarray:
    """Choices (rows, k) as float32 masks (rows, size)."""
    mask = np.zeros((len(ids), size), np.float32)
    inside = (ids >= 0) & (ids < size)
    rows = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    mask[rows[inside], ids[inside].astype(np.int64)] = 1
    return mask


def choice_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Return the agreement of two layers' choices (rows, k), 0 for chance and 1 for equality."""
    size, k = int(max(a.max(), b.max())) + 1, a.shape[1]
    ours, theirs = _choice_masks(a, size), _choice_masks(b, size)
    chance = float((ours.mean(0) * theirs.mean(0)).sum()) / k
    shared = float((ours * theirs).sum(1).mean()) / k
    if shared == 1:  # also where one choice fills a layer, which chance alone would explain
        return 1.0
    return (shared - chance) / max(1 - chance, 1e-9)


def _explained_disagreement(
    a: np.ndarray, b: np.ndarray, ours: RouteTable, theirs: RouteTable, reference: Routes
) -> Iterator[RouteFinding]:
    """Report which fault explains that layers disagree."""
    table = np.array(
        [[choice_agreement(a[:, i], b[:, j]) for j in range(b.shape[1])] for i in range(a.shape[1])]
    )
    straight = np.diag(table)
    if a.shape[1] == b.shape[1] and float(np.median(straight)) >= AGREES:
        yield from _shifted_layers(ours, theirs)
        yield from _disagreeing_layers(table, a, b, ours)
        return
    for explanation in (_moved_layers, _moved_rows, _renumbered_experts):
        finding = explanation(table, a, b, ours, theirs)
        if finding is not None:
            yield finding
            return
    evidence = {"agreement": float(np.median(straight))}
    yield RouteFinding(
        "token-shift", "unsound", "unexplained", len(a), len(a), "other-tokens", evidence
    )


def _shifted_layers(ours: RouteTable, theirs: RouteTable) -> Iterator[RouteFinding]:
    """Report routed layers that agree in order but have other indices on the layer axis."""
    total = ours.experts.shape[1]
    numbers = _router_layer_numbers(theirs)
    if total == len(ours.layers) or numbers is None or list(ours.layers) == numbers:
        return
    evidence = {"places": list(ours.layers)[:6], "expected": numbers[:6]}
    yield RouteFinding(
        "layer-shift", "unsound", "places", len(numbers), total, "dense-shift", evidence
    )


def _router_layer_numbers(model_routes: RouteTable) -> list[int] | None:
    """Numbers of the layers in the names of a model's routers."""
    names = model_routes.routes.layer_names
    if names is None:
        return None
    digits = [[int(x) for x in name.split(".") if x.isdecimal()] for name in names]
    if any(len(numbers) != 1 for numbers in digits):
        return None
    return [digits[layer][0] for layer in model_routes.layers]


def _disagreeing_layers(
    table: np.ndarray, a: np.ndarray, b: np.ndarray, ours: RouteTable
) -> Iterator[RouteFinding]:
    """Report single layers that disagree while the others agree."""
    straight = np.diag(table)
    odd = np.flatnonzero((straight < AGREES / 2) & (float(np.median(straight)) >= AGREES))
    if len(odd) == 0:
        return
    shift = _moved_layers(table, a, b, ours, ours)
    if shift is not None:
        yield replace(shift, count=len(odd))
        return
    names = [ours.routes.names[ours.layers[layer]] for layer in odd]
    numbered = [_renumbered_agreement(a[:, layer], b[:, layer]) for layer in odd]
    if min(numbered) >= AGREES:
        evidence = {"agreement": float(np.median(numbered)), "layers": names[:4]}
        count, total = len(odd), len(straight)
        yield RouteFinding(
            "out-of-range",
            "unsound",
            "renumbered-layers",
            count,
            total,
            "load-balancing",
            evidence,
        )
        return
    evidence = {
        "layers": names[:4],
        "layer": names[0],
        "agreement": float(straight[odd[0]]),
        "others": float(np.median(straight)),
    }
    count, total = len(odd), len(straight)
    yield RouteFinding("constant-layer", "unsound", "odd", count, total, "draft", evidence)


def _moved_layers(
    table: np.ndarray, a: np.ndarray, b: np.ndarray, ours: RouteTable, theirs: RouteTable
) -> RouteFinding | None:
    """Report layers that agree in another order."""
    left, right = linear_sum_assignment(-table)
    matched = table[left, right]
    counts = table.shape
    if float(np.median(matched)) < AGREES or (counts[0] == counts[1] and (left == right).all()):
        return None
    shifts = {int(j - i) for i, j in zip(left, right, strict=True)}
    pairs = [f"{i}→{j}" for i, j in zip(left, right, strict=True) if i != j]
    evidence = {"pairs": pairs[:6], "agreement": float(np.median(matched))}
    if counts[0] != counts[1]:
        case, reason = "layer-count" if pairs else "layer-count-straight", "dense-on-one-side"
        evidence["expected"] = counts[1]
    elif len(shifts) == 1:
        case, reason = "all-moved", "dense-shift"
        evidence["shift"] = shifts.pop()
    else:
        case, reason = "reordered", "list-order"
    return RouteFinding("layer-shift", "unsound", case, len(pairs), counts[0], reason, evidence)


def _moved_rows(
    table: np.ndarray, a: np.ndarray, b: np.ndarray, ours: RouteTable, theirs: RouteTable
) -> RouteFinding | None:
    """Report rows that match other rows of the reference."""
    layers, k = min(a.shape[1], b.shape[1]), a.shape[2]
    if layers != max(a.shape[1], b.shape[1]):
        return None
    size = int(max(a.max(), b.max())) + 1
    probes = np.unique(np.linspace(0, len(a) - 1, PROBES).astype(int))
    shared = sum(
        _choice_masks(a[probes, layer], size) @ _choice_masks(b[:, layer], size).T
        for layer in range(layers)
    )
    best = np.asarray(shared).argmax(1)
    height = np.asarray(shared).max(1) / (layers * k)
    moves, counts = np.unique(best - probes, return_counts=True)
    move, share = int(moves[counts.argmax()]), counts.max() / len(probes)
    if share < 0.3 or float(np.median(height)) < AGREES or move == 0:
        return None
    evidence = {"share": float(share), "shift": move}
    count = round(float(share) * len(a))
    return RouteFinding(
        "token-shift", "unsound", "moved-rows", count, len(a), "cut-prompt", evidence
    )


def _renumbered_experts(
    table: np.ndarray, a: np.ndarray, b: np.ndarray, ours: RouteTable, theirs: RouteTable
) -> RouteFinding | None:
    """Report experts that agree under another numbering."""
    if a.shape[1] != b.shape[1]:
        return None
    agreements = [_renumbered_agreement(a[:, x], b[:, x]) for x in range(a.shape[1])]
    if float(np.median(agreements)) < AGREES:
        return None
    evidence, layers = {"agreement": float(np.median(agreements))}, a.shape[1]
    return RouteFinding(
        "out-of-range", "unsound", "renumbered", layers, layers, "load-balancing", evidence
    )


def _renumbered_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Agreement on the second half of the rows under the numbering that fits the first best."""
    size = int(max(a.max(), b.max())) + 1
    left, right = _choice_masks(a, size), _choice_masks(b, size)
    half = len(left) // 2
    names, numbers = linear_sum_assignment(-(left[:half].T @ right[:half]))
    order = np.zeros(size, np.int64)
    order[names] = numbers
    return choice_agreement(order[a[half:].astype(np.int64)], b[half:])


class DocumentRows(NamedTuple):
    """Rows of one document on both sides, in the order of positions.

    Attributes:
        number: its number.
        ours: ids (tokens, layers, k) of the file.
        theirs: ids of the reference.
    """

    number: int
    ours: np.ndarray
    theirs: np.ndarray


class DocumentMove(NamedTuple):
    """Where the rows of a document belong: another document, a shift, or nowhere (both None)."""

    number: int
    other: int | None
    shift: int | None
    gain: float


def shared_ids(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return how many ids the rows (tokens, layers, k) of a and b share, over all layers."""
    return (a[..., :, None] == b[..., None, :]).sum((1, 2, 3))


def split_documents(
    ours: np.ndarray, theirs: np.ndarray, documents: np.ndarray
) -> list[DocumentRows]:
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
    return [DocumentRows(n, ours[index][:, layers], theirs[index][:, layers]) for n, index in rows]


def documents_astray(documents: list[DocumentRows]) -> Iterator[RouteFinding]:
    """Report documents whose rows are those of another, of neighbouring tokens, or of no document.

    Args:
        documents: at least two; see `split_documents`.
    """
    chance = _chance_agreement(documents)
    agreements = {x.number: _agreement_beyond_chance(x.ours, x.theirs, chance) for x in documents}
    moves = [
        move for x in documents if (move := _best_document_move(x, documents, chance)) is not None
    ]
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
    yield from moved_documents(moves, total)
    if strange:
        yield _document_finding(
            "strange-documents", list(map(str, strange)), total, "strange-requests"
        )


def moved_documents(moves: list[DocumentMove], total: int) -> Iterator[RouteFinding]:
    """Report documents whose rows belong to another document, or some places on."""
    exchanged = [f"{move.number} → {move.other}" for move in moves if move.other is not None]
    if exchanged:
        yield _document_finding("exchanged-documents", exchanged, total, "exchanged-requests")
    for shift in sorted({move.shift for move in moves if move.shift is not None}):
        shifted = [str(move.number) for move in moves if move.shift == shift]
        yield _document_finding("shifted-documents", shifted, total, "cut-prompt", shift)


def _document_finding(
    case: str, names: list[str], total: int, reason: str, shift: int = 0
) -> RouteFinding:
    """A finding that lists documents."""
    evidence = {"documents": names[:6], "shift": shift}
    return RouteFinding("token-shift", "unsound", case, len(names), total, reason, evidence)


def _chance_agreement(documents: list[DocumentRows]) -> float:
    """Mean share of ids that rows of independent tokens have in common."""
    ours = np.concatenate([x.ours for x in documents])
    theirs = np.concatenate([x.theirs for x in documents])
    size, shares = int(max(ours.max(), theirs.max())) + 1, []
    for layer in range(ours.shape[1]):
        loads = [np.bincount(x[:, layer].clip(0).ravel(), minlength=size) for x in (ours, theirs)]
        shares.append(float(loads[0] @ loads[1]) / len(ours) ** 2 / ours.shape[2])
    return float(np.mean(shares))


def _agreement_beyond_chance(a: np.ndarray, b: np.ndarray, chance: float) -> float:
    """Agreement of rows, 0 for chance and 1 for equality."""
    share = float(shared_ids(a, b).mean()) / (a.shape[1] * a.shape[2])
    return (share - chance) / max(1 - chance, 1e-9)


def _best_document_move(
    document: DocumentRows, documents: list[DocumentRows], chance: float
) -> DocumentMove | None:
    """The alternative that fits the rows of a document best, if any does."""
    shared = shared_ids(document.ours, document.theirs)
    if bool((shared == document.ours.shape[1] * document.ours.shape[2]).all()):
        return None
    moves = []
    for other in documents:
        if other.number != document.number:
            count = min(len(shared), len(other.theirs))
            gain = _move_gain(document.ours[:count], shared[:count], other.theirs[:count], chance)
            moves += (
                [] if gain is None else [DocumentMove(document.number, other.number, None, gain)]
            )
    for shift in SHIFTS:
        first, last = max(0, -shift), min(len(shared), len(shared) - shift)
        if last - first >= LEAST_TOKENS // 2:
            rows = document.theirs[first + shift : last + shift]
            gain = _move_gain(document.ours[first:last], shared[first:last], rows, chance)
            moves += [] if gain is None else [DocumentMove(document.number, None, shift, gain)]
    return max(moves, key=lambda move: move.gain, default=None)


def _move_gain(
    ours: np.ndarray, shared: np.ndarray, alternative: np.ndarray, chance: float
) -> float | None:
    """Mean ids more that the alternative shares; None if the rows do not belong there."""
    other = shared_ids(ours, alternative)
    wins, losses = int((other > shared).sum()), int((other < shared).sum())
    if wins < LEAST_WINS * (wins + losses) or wins == 0:
        return None
    if float(binom.sf(wins - 1, wins + losses, 0.5)) > LEVEL:
        return None
    return (
        float((other - shared).mean())
        if _agreement_beyond_chance(ours, alternative, chance) >= AGREES
        else None
    )
