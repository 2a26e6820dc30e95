"""Rows and layers that repeat each other where tokens do not: warm-up, exact ties, copies.

    warm-up         one row in a run longer than the persistence of the other rows explains
    tied-rows       rows whose k weights are equal, with one choice: an exact tie of all experts
    layer-run       one layer repeats a choice while the others, at the same rows, do not
    copied-layers   a layer whose rows are those of another

**Runs.** Sound rows repeat the row before them with probability q, estimated at all rows but those
of the repeated choice; a run of m among N rows has probability N·q^(m-1) at most. That holds for
one layer and few ids, where the load of the layer says nothing about a row that fills it.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tieline.trace.readers.routes import Routes
from tieline.trace.soundness import (
    IMPROBABLE,
    LEAST_COPIES,
    MANY_SHARE,
    RouteFinding,
    RouteTable,
    Severity,
    codes_of,
    route_table,
    row_codes,
)

LEAST_RUN, LONG_RUN, CERTAIN_RUN = 16, 64, 256
MOST_TIED = 0.9
"""Share of tied rows from which on equal weights are how the model combines experts."""
COPIED = 0.5
"""Agreement beyond chance from which on a layer is a copy of another."""
SAMPLED_ROWS = 4096


class EqualRun(NamedTuple):
    """The longest run of equal rows.

    Attributes:
        begin: first row.
        length: rows.
        copies: mask of the rows that stand in runs of that row.
        log10_chance: log10 of a bound on its probability.
    """

    begin: int
    length: int
    copies: np.ndarray
    log10_chance: float


def repetition_findings(routes: Routes, n_experts: int | None = None) -> list[RouteFinding]:
    """Find rows and layers that repeat each other.

    Args:
        routes: what a reader returned.
        n_experts: number of experts E, if it is known.
    """
    table = route_table(routes, n_experts)
    if not table.layers or len(routes.experts) < LEAST_RUN:
        return []
    tied = list(_tied_row_findings(table))
    tests = (_stale_layers, _copied_layer_findings)
    return [
        *(tied or _warm_up_findings(table)),
        *(finding for test in tests for finding in test(table)),
    ]


def repeated_rows(routes: Routes) -> np.ndarray:
    """Return the mask (rows,) of warm-up and exact ties: what `convert --drop warm-up` drops."""
    table = route_table(routes)
    mask = np.zeros(len(routes.experts), bool)
    if not table.layers or len(mask) < LEAST_RUN:
        return mask
    if list(_tied_row_findings(table)):
        mask |= tied_rows(table)
    if list(_warm_up_findings(table)):
        mask |= _longest_equal_run(row_codes(table)).copies
    return mask


def _longest_equal_run(codes: np.ndarray) -> EqualRun:
    """The longest run of equal codes, with the other runs of the same code."""
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1, [len(codes)]])
    lengths = np.diff(cuts)
    longest = int(lengths.argmax())
    begin, length = int(cuts[longest]), int(lengths[longest])
    of_row = np.repeat(lengths, lengths)
    copies = codes == codes[begin]
    others = codes[~copies]
    equal = int((np.diff(others) == 0).sum()) if len(others) > 1 else 0
    persistence = (equal + 1) / (max(len(others) - 1, 0) + 2)
    chance = min(math.log10(len(codes)) + (length - 1) * math.log10(persistence), 0.0)
    return EqualRun(begin, length, copies & (of_row >= LEAST_COPIES), chance)


def _warm_up_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """One row in a run that no text explains."""
    if table.routed.unwritten.all():
        return
    run = _longest_equal_run(row_codes(table))
    rows, total = np.flatnonzero(run.copies), len(run.copies)
    severity = _run_severity(table, run, len(rows) / total)
    if severity is None or table.routed.unwritten[run.begin]:
        return
    evidence = {
        "share": len(rows) / total,
        "run": run.length,
        "row": int(rows[0]),
        "log10_chance": run.log10_chance,
        "ids": table.experts[run.begin, table.layers[0]].tolist()[:8],
    }
    reason = "warm-up" if rows[0] == 0 else "dummy-rows"
    yield RouteFinding("repeated-rows", severity, "warm-up", len(rows), total, reason, evidence)


def _run_severity(table: RouteTable, run: EqualRun, share: float) -> Severity | None:
    """How grave a run of equal rows is; None if chance or one token explains it."""
    if run.length < LEAST_RUN or run.log10_chance > IMPROBABLE or share == 1:
        return None
    stretch = slice(run.begin, run.begin + run.length)
    tokens = table.routes.tokens
    if tokens is not None and bool((tokens[stretch] >= 0).all()):
        if not _is_one_token(table, stretch):
            return "unsound"
        is_dummy = run.length >= CERTAIN_RUN and _fills_document(table, stretch)
        return "suspicious" if is_dummy else None
    weights = table.routes.weights
    equal = weights is not None and bool((weights[stretch] == weights[run.begin]).all())
    long = run.length >= (LONG_RUN if equal else CERTAIN_RUN)
    most = share >= MANY_SHARE and run.length >= 2 * LEAST_RUN
    return "unsound" if long or most else "suspicious"


def tied_rows(table: RouteTable) -> np.ndarray:
    """Return the mask of rows whose k weights are equal in every routed layer."""
    weights, k = table.routes.weights, table.experts.shape[2]
    if weights is None or k == 1:
        return np.zeros(len(table.experts), bool)
    chosen = weights[:, list(table.layers)]
    return np.asarray((chosen == chosen[..., :1]).all((1, 2)) & (chosen[..., 0] > 0).all(1))


def _tied_row_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Rows with equal weights and one choice: all experts tie."""
    tied = tied_rows(table)
    rows, total = np.flatnonzero(tied), len(tied)
    if len(rows) < LEAST_COPIES or len(rows) > MOST_TIED * total:
        return
    _, counts = np.unique(row_codes(table)[rows], return_counts=True)
    if counts.max() < MOST_TIED * len(rows) or table.routes.weights is None:
        return
    first = table.layers[0]
    evidence = {
        "share": len(rows) / total,
        "row": int(rows[0]),
        "weight": float(table.routes.weights[rows[0], first, 0]),
        "ids": table.experts[rows[0], first].tolist()[:8],
    }
    severity: Severity = "unsound" if len(rows) >= LEAST_RUN else "suspicious"
    yield RouteFinding(
        "repeated-rows", severity, "tied-rows", len(rows), total, "zero-input", evidence
    )


def _stale_layers(table: RouteTable) -> Iterator[RouteFinding]:
    """Layers that repeat a choice in a stretch in which the other layers do not."""
    if len(table.layers) < 2:
        return
    codes = {layer: codes_of(table.experts[:, layer]) for layer in table.layers}
    for layer in table.layers:
        run = _longest_equal_run(codes[layer])
        chance = max(run.log10_chance, _log10_chance_by_load(codes[layer], run))
        if not LEAST_RUN * 2 <= run.length < len(codes[layer]) or chance > IMPROBABLE:
            continue
        stretch = slice(run.begin, run.begin + run.length)
        if table.routed.unwritten[run.begin] or not table.routed.mask[run.begin, layer]:
            continue
        others = [_changes_in(codes[x], stretch) for x in table.layers if x != layer]
        if min(others) < max(LEAST_COPIES, run.length // 4) or _is_one_token(table, stretch):
            continue
        evidence = {"layer": table.routes.names[layer], "row": run.begin, "others": min(others)}
        evidence["ids"] = table.experts[run.begin, layer].tolist()[:8]
        count, total = run.length, len(codes[layer])
        yield RouteFinding(
            "repeated-rows", "unsound", "layer-run", count, total, "stale-layer", evidence
        )
        return


def _changes_in(codes: np.ndarray, stretch: slice) -> int:
    """Changes of a layer's choice in a stretch; 0 if they are half as frequent as elsewhere.

    One token that comes again and again changes all layers more seldom.
    """
    changes = np.diff(codes) != 0
    inside = changes[stretch.start : stretch.stop - 1]
    outside = (float(changes.sum()) - float(inside.sum())) / max(len(changes) - len(inside), 1)
    return int(inside.sum()) if inside.mean() > 0.5 * outside else 0


def _is_one_token(table: RouteTable, stretch: slice) -> bool:
    """Whether most rows of a stretch are known to be one token."""
    if table.routes.tokens is None or bool((table.routes.tokens[stretch] < 0).any()):
        return False
    _, counts = np.unique(table.routes.tokens[stretch], return_counts=True)
    return int(counts.max()) >= 0.8 * int(counts.sum())


def _fills_document(table: RouteTable, stretch: slice) -> bool:
    """Whether a stretch holds all of a document of several, as that of a dummy prompt does."""
    middle = table.documents[(stretch.start + stretch.stop) // 2]
    rows = np.flatnonzero(table.documents == middle)
    inside = stretch.start <= rows[0] and rows[-1] < stretch.stop
    return bool(inside) and len(rows) < len(table.documents)


def _log10_chance_by_load(codes: np.ndarray, run: EqualRun) -> float:
    """log10 of N·p^(m-1), with p how often the run's choice follows itself outside of it."""
    outside = np.ones(len(codes), bool)
    outside[run.begin : run.begin + run.length] = False
    copies = codes == codes[run.begin]
    before = copies[:-1] & outside[:-1] & outside[1:]
    share = (float((copies[1:] & before).sum()) + 1) / (float(before.sum()) + 2)
    load = (float((copies & outside).sum()) + 1) / (float(outside.sum()) + 2)
    return min(math.log10(len(codes)) + (run.length - 1) * math.log10(max(share, load)), 0.0)


def _copied_layer_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Layers whose rows are those of another layer."""
    count = len(table.experts)
    rows = np.unique(np.linspace(0, count - 1, min(count, SAMPLED_ROWS)).astype(int))
    written = rows[table.routed.mask[rows][:, list(table.layers)].all(1)]
    if len(written) < 2 * LEAST_RUN or len(table.layers) < 2:
        return
    columns = [codes_of(np.sort(table.experts[written, x], axis=1)) for x in table.layers]
    pairs = []
    for j in range(1, len(columns)):
        for i in range(j):
            if _copy_agreement(columns[i], columns[j]) >= COPIED:
                pairs.append((i, j))
                break
    if pairs:
        names = [table.routes.names[x] for x in table.layers]
        evidence = {"pairs": [f"{names[j]} = {names[i]}" for i, j in pairs[:4]]}
        total = len(table.layers)
        yield RouteFinding(
            "copied-layers", "unsound", "copied", len(pairs), total, "layer-index", evidence
        )


def _copy_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Share of equal rows beyond chance; 0 where a column has too few choices to tell."""
    equal = float((a == b).mean())
    if equal < COPIED:
        return 0.0
    values, counts = np.unique(a, return_counts=True)
    others = dict(zip(*np.unique(b, return_counts=True), strict=True))
    if len(values) < LEAST_COPIES:
        return 0.0
    chance = sum(n * others.get(v, 0) for v, n in zip(values, counts, strict=True)) / len(a) ** 2
    return (equal - chance) / max(1 - chance, 1e-9)
