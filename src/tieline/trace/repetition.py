"""Rows and layers that repeat although tokens do not: warm-up, exact ties, copied layers.

    warm-up         one row in a run longer than the persistence of the other rows explains
    tied-rows       rows with k equal weights and one choice: an exact tie of all experts
    layer-run       one layer repeats a choice while the others, at the same rows, do not
    copied-layers   a layer with the rows of another

**Runs.** Sound rows repeat the previous row with probability q, estimated from all rows but those
of the repeated choice; a run of m among N rows has probability N·q^(m-1) at most. This also holds
for one layer and few ids, where a row that fills the layer also fills its load. Where one layer
repeats a choice and the others do not, m counts the different pairs of tokens that follow each
other (of choices of the other layers, if tokens are unknown): a loop of few tokens proves no more
than its first round.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tieline.trace.readers.routes import Routes
from tieline.trace.route_table import RouteTable, route_table, row_hashes, table_row_hashes
from tieline.trace.soundness import (
    LEAST_COPIES,
    LOG10_IMPROBABLE,
    MANY_COPIES_SHARE,
    RouteFinding,
    Severity,
)

LEAST_RUN, LONG_RUN, CERTAIN_RUN = 16, 64, 256
MOST_TIED_SHARE = 0.9
"""Share of tied rows above which the model itself combines experts with equal weights."""
LEAST_COPY_AGREEMENT = 0.5
"""Least agreement beyond chance of a layer that is a copy of another."""
SAMPLED_ROWS = 4096


class EqualRun(NamedTuple):
    """The longest run of equal rows.

    Attributes:
        begin: index of its first row.
        length: number of its rows.
        copies: mask of all rows that are in runs of that row.
        log10_chance: log10 of a bound on the probability of the run.
    """

    begin: int
    length: int
    copies: np.ndarray
    log10_chance: float


def repetition_findings(routes: Routes, n_experts: int | None = None) -> list[RouteFinding]:
    """Check routes for rows and layers that repeat although tokens do not.

    Args:
        routes: routes as a reader returns them.
        n_experts: number of experts E, if it is known.
    """
    table = route_table(routes, n_experts)
    if not table.layers or len(routes.experts) < LEAST_RUN:
        return []
    tied = list(_tied_row_findings(table))
    checks = (_stale_layer_findings, _copied_layer_findings)
    return [
        *(tied or _warm_up_findings(table)),
        *(finding for check in checks for finding in check(table)),
    ]


def repeated_row_mask(routes: Routes) -> np.ndarray:
    """Return the mask (rows,) of warm-up and exact ties, which `convert --drop warm-up` drops."""
    table = route_table(routes)
    mask = np.zeros(len(routes.experts), bool)
    if not table.layers or len(mask) < LEAST_RUN:
        return mask
    if list(_tied_row_findings(table)):
        mask |= tied_row_mask(table)
    if list(_warm_up_findings(table)):
        mask |= _longest_equal_run(table_row_hashes(table)).copies
    return mask


def _longest_equal_run(hashes: np.ndarray) -> EqualRun:
    """Return the longest run of equal hashes."""
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(hashes)) + 1, [len(hashes)]])
    lengths = np.diff(cuts)
    longest = int(lengths.argmax())
    begin, length = int(cuts[longest]), int(lengths[longest])
    of_row = np.repeat(lengths, lengths)
    copies = hashes == hashes[begin]
    others = hashes[~copies]
    equal = int((np.diff(others) == 0).sum()) if len(others) > 1 else 0
    persistence = (equal + 1) / (max(len(others) - 1, 0) + 2)
    chance = min(math.log10(len(hashes)) + (length - 1) * math.log10(persistence), 0.0)
    return EqualRun(begin, length, copies & (of_row >= LEAST_COPIES), chance)


def _warm_up_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report a run of one row that no text explains."""
    if table.routed.unwritten.all():
        return
    run = _longest_equal_run(table_row_hashes(table))
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
    """Return the severity of a run of equal rows; None if chance or one token explains it."""
    if run.length < LEAST_RUN or run.log10_chance > LOG10_IMPROBABLE or share == 1:
        return None
    stretch = slice(run.begin, run.begin + run.length)
    tokens = table.routes.tokens
    if tokens is not None and bool((tokens[stretch] >= 0).all()):
        if not _is_one_repeated_token(table, stretch):
            return "unsound"
        is_dummy = run.length >= CERTAIN_RUN and _fills_document(table, stretch)
        return "suspicious" if is_dummy else None
    weights = table.routes.weights
    equal = weights is not None and bool((weights[stretch] == weights[run.begin]).all())
    long = run.length >= (LONG_RUN if equal else CERTAIN_RUN)
    most = share >= MANY_COPIES_SHARE and run.length >= 2 * LEAST_RUN
    return "unsound" if long or most else "suspicious"


def tied_row_mask(table: RouteTable) -> np.ndarray:
    """Return the mask of rows whose k weights are equal in every routed layer."""
    weights, k = table.routes.weights, table.experts.shape[2]
    if weights is None or k == 1:
        return np.zeros(len(table.experts), bool)
    chosen = weights[:, list(table.layers)]
    return np.asarray((chosen == chosen[..., :1]).all((1, 2)) & (chosen[..., 0] > 0).all(1))


def _tied_row_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report rows with equal weights and one choice, as if all experts tie."""
    tied = tied_row_mask(table)
    rows, total = np.flatnonzero(tied), len(tied)
    if len(rows) < LEAST_COPIES or len(rows) > MOST_TIED_SHARE * total:
        return
    _, counts = np.unique(table_row_hashes(table)[rows], return_counts=True)
    if counts.max() < MOST_TIED_SHARE * len(rows) or table.routes.weights is None:
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


def _stale_layer_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report a layer that repeats a choice in a stretch in which the other layers do not."""
    if len(table.layers) < 2:
        return
    hashes = {layer: row_hashes(table.experts[:, layer]) for layer in table.layers}
    for layer in table.layers:
        run = _longest_equal_run(hashes[layer])
        if not LEAST_RUN * 2 <= run.length < len(hashes[layer]):
            continue
        stretch = slice(run.begin, run.begin + run.length)
        other_hashes = [hashes[x][stretch] for x in table.layers if x != layer]
        chance = max(run.log10_chance, _log10_bound_by_load(hashes[layer], run))
        rows = math.log10(len(hashes[layer]))
        pairs = _different_pairs(table, stretch, other_hashes)
        if rows + (chance - rows) * (pairs - 1) / (run.length - 1) > LOG10_IMPROBABLE:
            continue
        if table.routed.unwritten[run.begin] or not table.routed.mask[run.begin, layer]:
            continue
        others = [_choice_changes(hashes[x], stretch) for x in table.layers if x != layer]
        if min(others) < max(LEAST_COPIES, run.length // 4) or _is_one_repeated_token(
            table, stretch
        ):
            continue
        evidence = {"layer": table.routes.names[layer], "row": run.begin, "others": min(others)}
        evidence["ids"] = table.experts[run.begin, layer].tolist()[:8]
        count, total = run.length, len(hashes[layer])
        yield RouteFinding(
            "repeated-rows", "unsound", "layer-run", count, total, "stale-layer", evidence
        )
        return


def _different_pairs(table: RouteTable, stretch: slice, others: list[np.ndarray]) -> int:
    """Return how many different pairs of tokens, or of other layers' choices, follow each other."""
    tokens = table.routes.tokens
    has_tokens = tokens is not None and bool((tokens[stretch] >= 0).all())
    contexts = np.stack([tokens[stretch]] if tokens is not None and has_tokens else others, 1)
    return len(np.unique(np.hstack([contexts[:-1], contexts[1:]]), axis=0))


def _choice_changes(hashes: np.ndarray, stretch: slice) -> int:
    """Return how often a layer's choice changes in a stretch; 0 if half as often as elsewhere.

    Where one token is repeated, all layers change less often.
    """
    changes = np.diff(hashes) != 0
    inside = changes[stretch.start : stretch.stop - 1]
    outside = (float(changes.sum()) - float(inside.sum())) / max(len(changes) - len(inside), 1)
    return int(inside.sum()) if inside.mean() > 0.5 * outside else 0


def _is_one_repeated_token(table: RouteTable, rows: slice) -> bool:
    """Return whether at least 80 % of a stretch are known to be one token."""
    if table.routes.tokens is None or bool((table.routes.tokens[rows] < 0).any()):
        return False
    _, counts = np.unique(table.routes.tokens[rows], return_counts=True)
    return int(counts.max()) >= 0.8 * int(counts.sum())


def _fills_document(table: RouteTable, stretch: slice) -> bool:
    """Return whether a stretch covers one of several documents, as that of a dummy prompt does."""
    middle = table.documents[(stretch.start + stretch.stop) // 2]
    rows = np.flatnonzero(table.documents == middle)
    inside = stretch.start <= rows[0] and rows[-1] < stretch.stop
    return bool(inside) and len(rows) < len(table.documents)


def _log10_bound_by_load(hashes: np.ndarray, run: EqualRun) -> float:
    """Return log10 of N·p^(m-1), with p the share of repetitions of its choice outside the run."""
    outside = np.ones(len(hashes), bool)
    outside[run.begin : run.begin + run.length] = False
    copies = hashes == hashes[run.begin]
    before = copies[:-1] & outside[:-1] & outside[1:]
    share = (float((copies[1:] & before).sum()) + 1) / (float(before.sum()) + 2)
    load = (float((copies & outside).sum()) + 1) / (float(outside.sum()) + 2)
    return min(math.log10(len(hashes)) + (run.length - 1) * math.log10(max(share, load)), 0.0)


def _copied_layer_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report layers that have the rows of another layer."""
    count = len(table.experts)
    rows = np.unique(np.linspace(0, count - 1, min(count, SAMPLED_ROWS)).astype(int))
    written = rows[table.routed.mask[rows][:, list(table.layers)].all(1)]
    if len(written) < 2 * LEAST_RUN or len(table.layers) < 2:
        return
    columns = [row_hashes(np.sort(table.experts[written, x], axis=1)) for x in table.layers]
    pairs = []
    for j in range(1, len(columns)):
        for i in range(j):
            if _is_copy(columns[i], columns[j]):
                pairs.append((i, j))
                break
    if pairs:
        names = [table.routes.names[x] for x in table.layers]
        evidence = {"pairs": [f"{names[j]} = {names[i]}" for i, j in pairs[:4]]}
        total = len(table.layers)
        yield RouteFinding(
            "copied-layers", "unsound", "copied", len(pairs), total, "layer-index", evidence
        )


def _is_copy(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two layers agree, overall or in a quarter of the rows with many choices."""
    if _equal_row_agreement(a, b, LEAST_COPIES) >= LEAST_COPY_AGREEMENT:
        return True
    quarters = zip(np.array_split(a, 4), np.array_split(b, 4), strict=True)
    return any(_equal_row_agreement(*x, LEAST_RUN) >= LEAST_COPY_AGREEMENT for x in quarters)


def _equal_row_agreement(a: np.ndarray, b: np.ndarray, least_choices: int) -> float:
    """Return the share of equal rows beyond chance; 0 for columns with fewer choices."""
    equal = float((a == b).mean())
    if equal < LEAST_COPY_AGREEMENT:
        return 0.0
    values, counts = np.unique(a, return_counts=True)
    others = dict(zip(*np.unique(b, return_counts=True), strict=True))
    if len(values) < least_choices:
        return 0.0
    chance = sum(n * others.get(v, 0) for v, n in zip(values, counts, strict=True)) / len(a) ** 2
    return (equal - chance) / max(1 - chance, 1e-9)
