"""Compare routes with a reference of the same tokens, and find the fault if they disagree.

The agreement of a layer of the file with a layer of the reference is the mean share of experts that
both chose, in excess of the share c expected by chance, scaled so that equal choices give 1:

    a = (mean |S ∩ R| / k - c) / (1 - c),    c = Σ_e p_e q_e / k,

with p_e and q_e the shares of tokens that chose expert e on either side. It is 0 for independent
choices. With 0.5 or more (`LEAST_AGREEMENT`) two layers route the same tokens of the same model,
whatever their precisions. If layers do not agree in their order, these explanations are tried one
after the other, and the first with which they agree is reported:

    layers in another order   the best assignment of layers (Hungarian algorithm)
    rows of other tokens      the row of the reference that each of 64 rows fits best
    physical ids              the renumbering of each layer's experts that agrees best

**Document by document**: requests exchanged, shifted, or of another text. The row of each token of
a document shares o_t of its L·k ids with the reference's row of that token. An alternative (the
reference's rows of another document, or of a token a few positions on) shares a_t. Only tokens with
a_t ≠ o_t count: under a sound assignment a_t > o_t is no likelier than a_t < o_t even for identical
documents. So the rows belong to an alternative that wins at 3 of 4 of these tokens, with
P(Binomial(n, 1/2) ≥ wins) < 10⁻⁴, and agrees with 0.5 or more. Sixteen such tokens suffice.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import binom

from tieline.trace.readers.routes import Routes
from tieline.trace.route_table import RouteTable, route_table
from tieline.trace.soundness import RouteFinding

LEAST_AGREEMENT = 0.5
MOST_ROWS = 4096
PROBE_ROWS = 64
LEAST_DRIFT, LEAST_DRIFT_ROWS = 3.0, 64
"""Least reported ratio of differing choices in the last and the first quarter of the positions, and
least number of rows of a quarter."""
LEAST_WINS, SIGN_TEST_LEVEL = 0.75, 1e-4
LEAST_TOKENS = 16
SHIFTS = tuple(shift for n in range(1, 9) for shift in (-n, n))
MOST_LAYERS, MOST_TOKENS, MOST_DOCUMENTS = 8, 256, 64


def agreement_findings(
    routes: Routes, reference: Routes, n_experts: int | None = None
) -> list[RouteFinding]:
    """Return findings that explain why routes disagree with a reference of the same tokens.

    Args:
        routes: the routes to check; without documents and positions, rows are compared in order.
        reference: correct routes of the same tokens: of a model, or of another file.
        n_experts: number of experts.
    """
    ours, theirs = route_table(routes, n_experts), route_table(reference, n_experts)
    rows, other = _common_rows(routes, reference)
    mask = _fully_written_rows(ours, rows) & _fully_written_rows(theirs, other)
    written = rows[mask], other[mask]
    rows, other = written[0][:MOST_ROWS], written[1][:MOST_ROWS]
    if len(rows) == 0 or not ours.layers or not theirs.layers:
        return []
    if routes.experts.shape[2] != reference.experts.shape[2]:
        return [_different_k_finding(routes, reference)]
    other_ids = _other_token_ids_finding(routes, reference, written)
    if other_ids is not None:
        return [other_ids]
    a = routes.experts[rows][:, ours.layers]
    b = reference.experts[other][:, theirs.layers]
    drift = list(_position_drift_finding(a, b, ours, rows))
    misplaced = list(_misplaced_documents(ours, theirs, written))
    return misplaced or [*_disagreement_findings(a, b, ours, theirs), *drift]


def _misplaced_documents(
    ours: RouteTable, theirs: RouteTable, rows: tuple[np.ndarray, np.ndarray]
) -> Iterator[RouteFinding]:
    """Report documents whose rows belong to other tokens; nothing if all are shifted alike."""
    documents = ours.documents[rows[0]]
    if len(ours.layers) != len(theirs.layers) or len(np.unique(documents)) < 2:
        return
    positions = ours.routes.positions
    keys = (rows[0] if positions is None else positions[rows[0]], documents)
    order = np.lexsort(keys)
    left = ours.experts[rows[0][order]][:, ours.layers]
    right = theirs.experts[rows[1][order]][:, theirs.layers]
    findings = list(misplaced_document_findings(sampled_documents(left, right, documents[order])))
    if all(x.count < x.total or x.case == "exchanged-documents" for x in findings):
        yield from findings


def _position_drift_finding(
    a: np.ndarray, b: np.ndarray, ours: RouteTable, rows: np.ndarray
) -> Iterator[RouteFinding]:
    """Report differing choices that grow with the position, as with wrong rotary tables.

    Rounding changes about as many choices at late positions as at early ones; a wrong position
    table changes more, the later a token is. The share is taken over all layers.
    """
    if a.shape[1] != b.shape[1]:
        return
    positions = ours.routes.positions
    at = rows if positions is None else positions[rows]
    differing = 1 - shared_ids(a, b) / (a.shape[1] * a.shape[2])
    quarters = np.quantile(at, [0.25, 0.75])
    early, late = differing[at <= quarters[0]], differing[at >= quarters[1]]
    if (
        min(len(early), len(late)) < LEAST_DRIFT_ROWS
        or float(differing.mean()) > LEAST_AGREEMENT / 2
    ):
        return
    first, last = float(early.mean()), float(late.mean())
    error = math.sqrt(float(early.var()) / len(early) + float(late.var()) / len(late))
    ratio = last / max(first, 0.5 / (len(early) * a.shape[1] * a.shape[2]))
    if last - first < 6 * error or ratio < LEAST_DRIFT:
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
    """Return the mask of rows that are routed in every layer with experts."""
    return np.asarray(table.routed.mask[rows][:, list(table.layers)].all(1))


def _other_token_ids_finding(
    routes: Routes, reference: Routes, rows: tuple[np.ndarray, np.ndarray]
) -> RouteFinding | None:
    """Return the finding that the same rows have other token ids; None if they are equal."""
    if routes.tokens is None or reference.tokens is None:
        return None
    ours, theirs = routes.tokens[rows[0]], reference.tokens[rows[1]]
    differing = np.flatnonzero((ours != theirs) & (ours >= 0) & (theirs >= 0))
    if len(differing) == 0:
        return None
    first = differing[0]
    evidence = {
        "row": int(rows[0][first]),
        "ours": int(ours[first]),
        "theirs": int(theirs[first]),
    }
    count, total = len(differing), len(ours)
    return RouteFinding("token-shift", "unsound", "other-ids", count, total, "other-ids", evidence)


def _different_k_finding(routes: Routes, reference: Routes) -> RouteFinding:
    """Return the finding that file and reference choose different numbers of experts."""
    evidence = {"k": routes.experts.shape[2], "expected": reference.experts.shape[2]}
    rows = len(routes.experts)
    return RouteFinding("layer-shift", "unsound", "other-k", rows, rows, "other-shape", evidence)


def _common_rows(routes: Routes, reference: Routes) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of both sides that have the same document and position, as index pairs."""
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
    """Return choices (rows, k) as float32 masks (rows, size)."""
    mask = np.zeros((len(ids), size), np.float32)
    inside = (ids >= 0) & (ids < size)
    rows = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    mask[rows[inside], ids[inside].astype(np.int64)] = 1
    return mask


def choice_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Return the agreement of two layers' choices (rows, k): 0 by chance, 1 if equal."""
    size, k = int(max(a.max(), b.max())) + 1, a.shape[1]
    ours, theirs = _choice_masks(a, size), _choice_masks(b, size)
    chance = float((ours.mean(0) * theirs.mean(0)).sum()) / k
    shared = float((ours * theirs).sum(1).mean()) / k
    if shared == 1:  # also if a layer has one choice only, so that chance = 1
        return 1.0
    return (shared - chance) / max(1 - chance, 1e-9)


def _disagreement_findings(
    a: np.ndarray, b: np.ndarray, ours: RouteTable, theirs: RouteTable
) -> Iterator[RouteFinding]:
    """Report the fault that explains why layers disagree, if they do."""
    agreements = np.array(
        [[choice_agreement(a[:, i], b[:, j]) for j in range(b.shape[1])] for i in range(a.shape[1])]
    )
    in_order = np.diag(agreements)
    if a.shape[1] == b.shape[1] and float(np.median(in_order)) >= LEAST_AGREEMENT:
        yield from _layer_index_findings(ours, theirs)
        yield from _single_layer_findings(agreements, a, b, ours)
        return
    evidence = {"agreement": float(np.median(in_order))}
    yield (
        _moved_layers_finding(agreements)
        or _moved_rows_finding(a, b)
        or _renumbered_experts_finding(a, b)
        or RouteFinding(
            "token-shift", "unsound", "unexplained", len(a), len(a), "other-tokens", evidence
        )
    )


def _layer_index_findings(ours: RouteTable, theirs: RouteTable) -> Iterator[RouteFinding]:
    """Report routed layers that agree in order, at other indices of the layer axis."""
    total = ours.experts.shape[1]
    numbers = _router_layer_numbers(theirs)
    if total == len(ours.layers) or numbers is None or list(ours.layers) == numbers:
        return
    evidence = {"places": list(ours.layers)[:6], "expected": numbers[:6]}
    yield RouteFinding(
        "layer-shift", "unsound", "places", len(numbers), total, "dense-shift", evidence
    )


def _router_layer_numbers(model_routes: RouteTable) -> list[int] | None:
    """Return the layer numbers in the names of a model's routers; None if they are ambiguous."""
    names = model_routes.routes.layer_names
    if names is None:
        return None
    digits = [[int(x) for x in name.split(".") if x.isdecimal()] for name in names]
    if any(len(numbers) != 1 for numbers in digits):
        return None
    return [digits[layer][0] for layer in model_routes.layers]


def _single_layer_findings(
    agreements: np.ndarray, a: np.ndarray, b: np.ndarray, ours: RouteTable
) -> Iterator[RouteFinding]:
    """Report layers that disagree while most others agree."""
    in_order = np.diag(agreements)
    odd = np.flatnonzero(in_order < LEAST_AGREEMENT / 2)
    if len(odd) == 0:
        return
    shift = _moved_layers_finding(agreements)
    if shift is not None:
        yield replace(shift, count=len(odd))
        return
    names = [ours.routes.names[ours.layers[layer]] for layer in odd]
    numbered = [_renumbered_agreement(a[:, layer], b[:, layer]) for layer in odd]
    if min(numbered) >= LEAST_AGREEMENT:
        evidence = {"agreement": float(np.median(numbered)), "layers": names[:4]}
        count, total = len(odd), len(in_order)
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
        "agreement": float(in_order[odd[0]]),
        "others": float(np.median(in_order)),
    }
    count, total = len(odd), len(in_order)
    yield RouteFinding("constant-layer", "unsound", "odd", count, total, "draft", evidence)


def _moved_layers_finding(agreements: np.ndarray) -> RouteFinding | None:
    """Return the finding that layers agree in another order; None if they do not."""
    left, right = linear_sum_assignment(-agreements)
    matched = agreements[left, right]
    counts = agreements.shape
    if float(np.median(matched)) < LEAST_AGREEMENT or (
        counts[0] == counts[1] and (left == right).all()
    ):
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


def _moved_rows_finding(a: np.ndarray, b: np.ndarray) -> RouteFinding | None:
    """Return the finding that rows match other rows of the reference; None if they do not."""
    layers, k = min(a.shape[1], b.shape[1]), a.shape[2]
    if layers != max(a.shape[1], b.shape[1]):
        return None
    size = int(max(a.max(), b.max())) + 1
    probes = np.unique(np.linspace(0, len(a) - 1, PROBE_ROWS).astype(int))
    shared = sum(
        _choice_masks(a[probes, layer], size) @ _choice_masks(b[:, layer], size).T
        for layer in range(layers)
    )
    best = np.asarray(shared).argmax(1)
    height = np.asarray(shared).max(1) / (layers * k)
    moves, counts = np.unique(best - probes, return_counts=True)
    move, share = int(moves[counts.argmax()]), counts.max() / len(probes)
    if share < 0.3 or float(np.median(height)) < LEAST_AGREEMENT or move == 0:
        return None
    evidence = {"share": float(share), "shift": move}
    count = round(float(share) * len(a))
    return RouteFinding(
        "token-shift", "unsound", "moved-rows", count, len(a), "cut-prompt", evidence
    )


def _renumbered_experts_finding(a: np.ndarray, b: np.ndarray) -> RouteFinding | None:
    """Return the finding that layers agree after renumbering experts; None if they do not."""
    if a.shape[1] != b.shape[1]:
        return None
    if a.min() > 0:
        lowered = [choice_agreement(a[:, x] - 1, b[:, x]) for x in range(a.shape[1])]
        if float(np.median(lowered)) >= LEAST_AGREEMENT:
            evidence, layers = {"agreement": float(np.median(lowered))}, a.shape[1]
            return RouteFinding(
                "out-of-range", "unsound", "one-higher", layers, layers, "from-one", evidence
            )
    renumbered = [_renumbered_agreement(a[:, x], b[:, x]) for x in range(a.shape[1])]
    if float(np.median(renumbered)) < LEAST_AGREEMENT:
        return None
    evidence, layers = {"agreement": float(np.median(renumbered))}, a.shape[1]
    return RouteFinding(
        "out-of-range", "unsound", "renumbered", layers, layers, "load-balancing", evidence
    )


def _renumbered_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Return the agreement of the second half of the rows, renumbered by the first half."""
    size = int(max(a.max(), b.max())) + 1
    left, right = _choice_masks(a, size), _choice_masks(b, size)
    half = len(left) // 2
    names, numbers = linear_sum_assignment(-(left[:half].T @ right[:half]))
    order = np.zeros(size, np.int64)
    order[names] = numbers
    return choice_agreement(order[a[half:].astype(np.int64)], b[half:])


class DocumentRows(NamedTuple):
    """Rows of one document in the file and in the reference, in the order of positions.

    Attributes:
        number: document number.
        ours: ids (tokens, layers, k) in the file.
        theirs: ids (tokens, layers, k) in the reference.
    """

    number: int
    ours: np.ndarray
    theirs: np.ndarray


class DocumentMove(NamedTuple):
    """Where the rows of a document belong: to another document, or to its own tokens shifted.

    Attributes:
        number: document number.
        other: document that the rows belong to; None for a shift.
        shift: tokens by which the rows are shifted; None for another document.
        gain: mean increase of the fit per row.
    """

    number: int
    other: int | None
    shift: int | None
    gain: float


def shared_ids(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the number of ids (tokens,) that rows (tokens, layers, k) share, over all layers."""
    return (a[..., :, None] == b[..., None, :]).sum((1, 2, 3))


def sampled_documents(
    ours: np.ndarray, theirs: np.ndarray, documents: np.ndarray
) -> list[DocumentRows]:
    """Sample up to 64 documents, 256 rows of each and 8 layers.

    Args:
        ours: ids (rows, layers, k) of the file, ordered by document and position.
        theirs: ids of the reference at the same tokens.
        documents: document of each row.
    """
    layers = np.unique(np.linspace(0, ours.shape[1] - 1, MOST_LAYERS).astype(int))
    numbers = np.unique(documents)
    chosen = np.unique(np.linspace(0, len(numbers) - 1, MOST_DOCUMENTS).astype(int))
    rows = [(int(n), np.flatnonzero(documents == n)[:MOST_TOKENS]) for n in numbers[chosen]]
    return [DocumentRows(n, ours[index][:, layers], theirs[index][:, layers]) for n, index in rows]


def misplaced_document_findings(documents: list[DocumentRows]) -> Iterator[RouteFinding]:
    """Report documents whose rows belong to another document, to shifted tokens, or to neither.

    Args:
        documents: at least two; see `sampled_documents`.
    """
    chance = _chance_agreement(documents)
    agreements = {x.number: _agreement_beyond_chance(x.ours, x.theirs, chance) for x in documents}
    moves = [move for x in documents if (move := _best_move(x, documents, chance)) is not None]
    moved = {move.number for move in moves}
    usual = float(np.median(list(agreements.values())))
    unrelated = [
        x.number
        for x in documents
        if x.number not in moved
        and len(x.ours) >= LEAST_TOKENS
        and agreements[x.number] < LEAST_AGREEMENT / 2 <= LEAST_AGREEMENT <= usual
    ]
    total = len(documents)
    yield from moved_document_findings(moves, total)
    if unrelated:
        yield _document_finding(
            "strange-documents", list(map(str, unrelated)), total, "strange-requests"
        )


def moved_document_findings(moves: list[DocumentMove], total: int) -> Iterator[RouteFinding]:
    """Report documents whose rows belong to another document or to shifted tokens."""
    exchanged = [f"{move.number} → {move.other}" for move in moves if move.other is not None]
    if exchanged:
        yield _document_finding("exchanged-documents", exchanged, total, "exchanged-requests")
    for shift in sorted({move.shift for move in moves if move.shift is not None}):
        shifted = [str(move.number) for move in moves if move.shift == shift]
        yield _document_finding("shifted-documents", shifted, total, "cut-prompt", shift)


def _document_finding(
    case: str, names: list[str], total: int, reason: str, shift: int = 0
) -> RouteFinding:
    """Return a finding about documents, with the names of the first six."""
    evidence = {"documents": names[:6], "shift": shift}
    return RouteFinding("token-shift", "unsound", case, len(names), total, reason, evidence)


def _chance_agreement(documents: list[DocumentRows]) -> float:
    """Return the mean share of ids that rows of independent tokens have in common."""
    ours = np.concatenate([x.ours for x in documents])
    theirs = np.concatenate([x.theirs for x in documents])
    size, shares = int(max(ours.max(), theirs.max())) + 1, []
    for layer in range(ours.shape[1]):
        loads = [np.bincount(x[:, layer].clip(0).ravel(), minlength=size) for x in (ours, theirs)]
        shares.append(float(loads[0] @ loads[1]) / len(ours) ** 2 / ours.shape[2])
    return float(np.mean(shares))


def _agreement_beyond_chance(a: np.ndarray, b: np.ndarray, chance: float) -> float:
    """Return the agreement of rows (tokens, layers, k): 0 by chance, 1 if equal."""
    share = float(shared_ids(a, b).mean()) / (a.shape[1] * a.shape[2])
    return (share - chance) / max(1 - chance, 1e-9)


def _best_move(
    document: DocumentRows, documents: list[DocumentRows], chance: float
) -> DocumentMove | None:
    """Return the alternative that fits the rows of a document best; None if none fits better."""
    shared = shared_ids(document.ours, document.theirs)
    if bool((shared == document.ours.shape[1] * document.ours.shape[2]).all()):
        return None
    moves = []
    for other in documents:
        if other.number != document.number:
            count = min(len(shared), len(other.theirs))
            gain = _significant_move_gain(
                document.ours[:count], shared[:count], other.theirs[:count], chance
            )
            moves += (
                [] if gain is None else [DocumentMove(document.number, other.number, None, gain)]
            )
    for shift in SHIFTS:
        first, last = max(0, -shift), min(len(shared), len(shared) - shift)
        if last - first >= LEAST_TOKENS // 2:
            rows = document.theirs[first + shift : last + shift]
            gain = _significant_move_gain(
                document.ours[first:last], shared[first:last], rows, chance
            )
            moves += [] if gain is None else [DocumentMove(document.number, None, shift, gain)]
    return max(moves, key=lambda move: move.gain, default=None)


def _significant_move_gain(
    ours: np.ndarray, shared: np.ndarray, alternative: np.ndarray, chance: float
) -> float | None:
    """Return the mean of a_t - o_t for an alternative; None if it does not pass the test."""
    gain = significant_gain(shared_ids(ours, alternative) - shared, SIGN_TEST_LEVEL, LEAST_WINS)
    if gain is None or _agreement_beyond_chance(ours, alternative, chance) < LEAST_AGREEMENT:
        return None
    return gain


def significant_gain(gains: np.ndarray, level: float, least_wins: float) -> float | None:
    """Return the mean gain if positive gains outnumber negative ones by a sign test, else None.

    Args:
        gains: gain of each token.
        level: level of the sign test.
        least_wins: least share of positive gains among those that are not zero.
    """
    gains = gains.round(6)  # equal sums in another order are equal
    wins, losses = int((gains > 0).sum()), int((gains < 0).sum())
    if wins == 0 or wins < least_wins * (wins + losses):
        return None
    if float(binom.sf(wins - 1, wins + losses, 0.5)) > level:
        return None
    return float(gains.mean())
