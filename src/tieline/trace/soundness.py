"""Checks of a file of routes for known faults of recording.

Each finding holds the fault, its count, the first occurrence and the likely cause as data; the
sentences are written by `tieline.report.words.check`. Severities:

    unsound      no router of a sound run writes this
    suspicious   sound runs write this now and then: look at it
    note         worth knowing: a dense layer, a last token without a row

    all-zero          zeros in all ids, or in rows that should have been written
    repeated-rows     one row more often than routing explains
    duplicate-expert  an expert twice in one token
    out-of-range      ids that no expert has
    constant-layer    a layer that is dense, constant, or unlike the others
    row-count         rows that do not fit the tokens
    token-shift       rows of other tokens (`trace.token_fit`, `trace.reference_agreement`)
    layer-shift       layers in another order (`trace.reference_agreement`)
    copied-layers     layers whose rows are those of another (`trace.repetition`)
    weights           combine weights that are not finite, or of another sum than the others
    dead-experts      experts that no token chose, beyond chance

**Repeated rows.** A row occurs m times among N rows. If f_l is the share of rows with its choice in
layer l, chance gives it N·Π f_l times, and P(≥ m copies) ≤ exp(-N·kl(m/N, Π f_l)), which the
finding states. Layers are not independent, and a repeated token repeats its row: copies of one
token, or of tokens whose other rows are mostly copies too, are no finding, and a few copies are at
most suspicious. A stale row falls on tokens as they come.

**Dead experts.** Experts without a token, if every chosen expert has at least 5: an expert with a
fifth of the least observed load would be missed with probability e^-1 only. With fewer tokens
nothing is reported.

Layers are checked one by one, so that memory stays at a few columns.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from tieline.core.records import Worded
from tieline.trace.readers.routes import Routes
from tieline.trace.route_table import RouteTable, route_table, row_hashes, table_row_hashes

Kind = Literal[
    "all-zero",
    "repeated-rows",
    "duplicate-expert",
    "out-of-range",
    "constant-layer",
    "row-count",
    "layer-shift",
    "token-shift",
    "copied-layers",
    "weights",
    "dead-experts",
]
Severity = Literal["unsound", "suspicious", "note"]

LEAST_COPIES, MANY_COPIES, MANY_COPIES_SHARE = 8, 32, 0.3
LEAST_CONSTANT_ROWS = 64
LEAST_EXPERT_LOAD = 5
LOG10_IMPROBABLE = -9.0
"""log10 of the probability below which copies are not explained by chance."""
LEAST_TOKEN_SHARE = 0.5
"""Least share of copies among the other rows of a copy's token, beyond that among all rows, with
which the row is that of its tokens."""
EQUAL_SUMS, OTHER_SUM, LEAST_USUAL_SHARE, SAMPLED_SUMS = 0.002, 0.05, 0.9, 1 << 14
"""Largest relative difference of equal sums of weights, least of another sum, and least share of
equal ones: sums that are not normalised differ by less and by more."""


@dataclass(frozen=True)
class RouteFinding(Worded):
    """A fault or a remark about a file of routes.

    Attributes:
        message: one sentence with the numbers.
        where: the first place, and what stands there.
        cause: the likely cause, and what to do.
        kind: what it is.
        severity: "unsound", "suspicious" or "note".
        case: which case of its kind was found.
        count: how many rows, tokens, layers or experts it concerns.
        total: of how many.
        reason: name of the likely cause; empty where there is none.
        evidence: numbers and names that the sentences quote.
        file: name of the file, where several were checked.
    """

    sentences: ClassVar[tuple[str, ...]] = ("message", "where", "cause")

    kind: Kind
    severity: Severity
    case: str
    count: int
    total: int
    reason: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""

    @property
    def message(self) -> str:
        """One sentence with the numbers."""
        return self.sentence("message")

    @property
    def where(self) -> str:
        """The first place, and what stands there; empty where no place is meant."""
        return self.sentence("where")

    @property
    def cause(self) -> str:
        """The likely cause, and what to do; empty without a reason."""
        return self.sentence("cause")


def soundness_findings(routes: Routes, n_experts: int | None = None) -> list[RouteFinding]:
    """Check routes for known faults of recording.

    Args:
        routes: routes as a reader returns them.
        n_experts: number of experts E, if it is known.
    """
    table = route_table(routes, n_experts)
    unwritten = list(_unwritten_array_findings(table))
    if unwritten:
        return unwritten
    checks = (
        _row_count_findings,
        _unwritten_row_findings,
        _dense_layer_notes,
        _out_of_range_findings,
        _duplicate_expert_findings,
        _constant_layer_findings,
        _repeated_row_findings,
        _weight_findings,
        _dead_expert_findings,
    )
    return [finding for check in checks for finding in check(table)]


def _unwritten_array_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report an array in which no token was routed: all ids 0, all -1, or every layer dense."""
    ids, (rows, layers, k) = table.experts, table.experts.shape
    if k == 1 and (rows * layers < 16 or table.n_experts == 1):
        return
    for value in (0, -1):
        if ids.dtype.kind == "u" and value < 0:
            continue
        if int(ids.min()) == value == int(ids.max()):
            evidence = {"ids": ids.size, "value": value}
            yield RouteFinding(
                "all-zero", "unsound", "all-ids", rows, rows, "unwritten-buffer", evidence
            )
            return
    if not table.layers:
        evidence = {"layers": [*table.routed.dense.values()][:4]}
        yield RouteFinding(
            "all-zero", "unsound", "no-layer", layers, layers, "unwritten-buffer", evidence
        )


def _row_count_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report documents whose number of rows does not fit their tokens."""
    routes, documents = table.routes, int(table.documents.max()) + 1
    if routes.problems:
        first, count = routes.problems[0], len(routes.problems)
        evidence = {
            "problem": first.message,
            "document": first.document,
            "rows": first.rows,
            "tokens": first.tokens,
        }
        yield RouteFinding(
            "row-count", "unsound", "other-rows", count, documents, "rows-of-a-turn", evidence
        )
    if routes.ends:
        yield RouteFinding("row-count", "note", "last-token", routes.ends, documents)


def _unwritten_end_masks(table: RouteTable) -> tuple[np.ndarray, np.ndarray]:
    """Return masks of the unwritten rows at the beginning and at the end of their documents."""
    blank, documents = table.routed.unwritten, table.documents
    cuts = np.flatnonzero(np.diff(documents)) + 1
    first, last = np.zeros_like(blank), np.zeros_like(blank)
    for document in np.split(np.arange(len(blank)), cuts) if blank.any() else ():
        filled = np.flatnonzero(~blank[document])
        first[document[: filled[0] if len(filled) else len(document)]] = True
        last[document[filled[-1] + 1 if len(filled) else len(document) :]] = True
    return first & blank, last & blank


def _unwritten_row_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report rows of zeros inside or at the ends of documents."""
    blank = table.routed.unwritten
    count, total = int(blank.sum()), len(blank)
    if not count:
        return
    first, last = _unwritten_end_masks(table)
    documents = len(np.unique(table.documents))
    inside = int((blank & ~first & ~last).sum())
    batch = table.routes.producer in ("verl", "slime", "miles")
    evidence = {"row": int(blank.argmax()), "inside": inside, "k": table.experts.shape[2]}
    if inside or (first.any() and not batch):
        severity, case, reason = "unsound", "zeros-inside", "skipped-rows"
    elif int(last.sum()) <= documents:
        severity, case, reason = "note", "zeros-last", "no-last-route"
    else:
        severity, case, reason = ("note" if batch else "suspicious"), "zeros-at-ends", "padding"
    yield RouteFinding("all-zero", severity, case, count, total, reason, evidence)
    if severity != "note":
        yield RouteFinding(
            "duplicate-expert", severity, "zeros-as-ids", count, total, "zeros", evidence
        )


def _dense_layer_notes(table: RouteTable) -> Iterator[RouteFinding]:
    """Note the layers that are not routed."""
    dense, names = table.routed.dense, table.routes.names
    if dense:
        layers = [f"{names[layer]} ({why})" for layer, why in list(dense.items())[:4]]
        evidence = {"layers": layers, "layer": names[next(iter(dense))]}
        count, total = len(dense), len(names)
        yield RouteFinding("constant-layer", "note", "dense", count, total, "dense", evidence)


def _out_of_range_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report ids outside 0 ... E - 1, or much larger in one layer than in all others."""
    ids, most = table.experts, table.n_experts
    limit = np.iinfo(ids.dtype).max
    if most is not None and most - 1 > limit:
        evidence = {"dtype": str(ids.dtype), "limit": limit, "experts": most}
        yield RouteFinding(
            "out-of-range", "unsound", "wrapped", ids.size, ids.size, "small-type", evidence
        )
    tops = {layer: int(table.routed_ids(layer).max(initial=0)) for layer in table.layers}
    wrong = _ids_out_of_range(table, most)
    if wrong:
        yield _out_of_range_finding(table, wrong, tops, most)
    elif most is None and len(tops) >= 3:
        ordered = sorted(tops, key=lambda layer: tops[layer])
        top, second = tops[ordered[-1]], tops[ordered[-2]]
        enough = len(ids) * ids.shape[2] >= 8 * (second + 1)
        if enough and second >= 3 and top + 1 >= 1.5 * (second + 1):
            layer = table.routes.names[ordered[-1]]
            evidence = {"layer": layer, "top": top, "second": second}
            yield RouteFinding(
                "out-of-range", "suspicious", "one-wide", 1, len(tops), "draft-unsure", evidence
            )


def _ids_out_of_range(table: RouteTable, most: int | None) -> dict[int, tuple[int, int, int]]:
    """Return, by layer, the number of tokens with an id out of range, the first row and its id."""
    wrong = {}
    for layer in table.layers:
        column = table.routed_ids(layer)
        signed = column.dtype.kind == "i" and int(column.min(initial=0)) < 0
        if not signed and (most is None or int(column.max(initial=0)) < most):
            continue
        bad = (column < 0) if most is None else (column < 0) | (column >= most)
        rows = np.flatnonzero(table.routed.mask[:, layer])[np.flatnonzero(bad.any(1))]
        if len(rows):
            first = table.experts[rows[0], layer]
            odd = first[(first < 0) | (first >= (most or np.iinfo(first.dtype).max))]
            wrong[layer] = len(rows), int(rows[0]), int(odd[0])
    return wrong


def _out_of_range_finding(
    table: RouteTable,
    wrong: dict[int, tuple[int, int, int]],
    tops: dict[int, int],
    most: int | None,
) -> RouteFinding:
    """Return the finding of ids outside 0 ... E - 1, with the likely cause."""
    count = sum(number for number, _, _ in wrong.values())
    total = len(table.experts) * len(table.layers)
    first_layer = next(iter(wrong))
    several = len(wrong) > max(1, len(table.layers) // 2)
    highest = max(tops[layer] for layer in wrong)
    if any(value < 0 for _, _, value in wrong.values()):
        reason = "mixed-rows"
    elif highest == most and all(table.routed_ids(layer).min() > 0 for layer in table.layers):
        reason = "from-one"
    elif several and most is not None and highest < 2 * most:
        reason = "physical-ids"
    else:
        reason = "other-model" if several else "draft-layers"
    _, row, value = wrong[first_layer]
    evidence = {
        "experts": "E" if most is None else most,
        "wrong": len(wrong),
        "layers": len(table.layers),
        "row": row,
        "layer": table.routes.names[first_layer],
        "value": value,
    }
    return RouteFinding("out-of-range", "unsound", "outside", count, total, reason, evidence)


def _duplicate_expert_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report tokens that have an expert twice in one layer."""
    k = table.experts.shape[2]
    if k == 1:
        return
    repeats, zeros = {}, 0
    for layer in table.layers:
        column = table.routed_ids(layer)
        ordered = np.sort(column, axis=1)
        twice = ordered[:, 1:] == ordered[:, :-1]
        rows = np.flatnonzero(twice.any(1))
        if len(rows):
            row = np.flatnonzero(table.routed.mask[:, layer])[rows[0]]
            repeats[layer] = len(rows), int(row), column[rows[0]].tolist()
            zeros += int(((ordered[rows] == 0).sum(1) > 1).sum())
    if not repeats:
        return
    count = sum(number for number, _, _ in repeats.values())
    layer = next(iter(repeats))
    _, row, ids = repeats[layer]
    if zeros == count:
        reason = "placeholders"
    else:
        single = len(repeats) == 1 and len(table.layers) > 1
        reason = "one-layer" if single else "mixed-or-cast"
    evidence = {
        "wrong": len(repeats),
        "layers": len(table.layers),
        "row": row,
        "layer": table.routes.names[layer],
        "value": ids[:8],
    }
    total = len(table.experts) * len(table.layers)
    yield RouteFinding("duplicate-expert", "unsound", "twice", count, total, reason, evidence)


def _constant_layer_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report layers with one choice in all rows, and layers that use the first experts only."""
    distinct, tops, alive = {}, {}, {}
    for layer in table.layers:
        column = table.routed_ids(layer)
        same = bool((column == column[:1]).all())
        distinct[layer] = 1 if same else max(len(np.unique(row_hashes(column[:4096]))), 2)
        counts = np.bincount(column.ravel()[: 1 << 22].clip(min=0))
        tops[layer], alive[layer] = len(counts), int((counts > 0).sum())
    others = sorted(distinct.values())
    usual = others[len(others) // 2]
    names, rows = table.routes.names, len(table.experts)
    if usual == 1 == others[-1] and rows >= LEAST_CONSTANT_ROWS:
        yield from _constant_file_findings(table)
    for layer, number in distinct.items():
        if number == 1 and usual > 1 and rows >= LEAST_CONSTANT_ROWS // 4:
            sure = rows >= LEAST_CONSTANT_ROWS and usual >= 8 and table.experts.shape[2] > 1
            evidence = {
                "layer": names[layer],
                "ids": table.routed_ids(layer)[0].tolist()[:8],
                "usual": usual,
            }
            severity = "unsound" if sure else "suspicious"
            yield RouteFinding(
                "constant-layer", severity, "constant", rows, rows, "written-once", evidence
            )
    yield from _narrow_layer_findings(table, tops, {x for x in tops if alive[x] >= 0.9 * tops[x]})


def _constant_file_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report that all rows are equal, unless they are known to be of one token."""
    tokens, rows = table.routes.tokens, len(table.experts)
    one_token = tokens is not None and int(tokens.min()) == int(tokens.max()) >= 0
    if not one_token:
        first = table.layers[0]
        evidence = {"layer": table.routes.names[first], "layers": len(table.layers)}
        evidence |= {"ids": table.routed_ids(first)[0].tolist()[:8]}
        yield RouteFinding(
            "constant-layer", "suspicious", "all-constant", rows, rows, "written-once", evidence
        )


def _narrow_layer_findings(
    table: RouteTable, tops: dict[int, int], full: set[int]
) -> Iterator[RouteFinding]:
    """Report layers that use only the first experts while the others use all."""
    widest, (rows, _, k) = max(tops.values()), table.experts.shape
    for layer, top in tops.items():
        others = all(tops[x] >= 0.9 * widest for x in tops if x != layer)
        confined = 1 < top <= widest / 2 and widest - top >= 8 and layer in full
        if len(tops) > 2 and rows * k >= 10 * widest and others and confined:
            evidence = {"layer": table.routes.names[layer], "top": top - 1, "widest": widest - 1}
            yield RouteFinding(
                "constant-layer", "suspicious", "narrow", 1, len(tops), "narrow-draft", evidence
            )


def _original_document_mask(table: RouteTable, hashes: np.ndarray) -> np.ndarray:
    """Return the mask of rows of documents that are not copies of an earlier document."""
    documents = table.documents
    cuts = np.flatnonzero(np.diff(documents)) + 1
    kept, contents = np.ones(len(hashes), bool), set()
    if len(cuts) == 0:
        return kept
    for document in np.split(np.arange(len(hashes)), cuts):
        key = hashes[document].tobytes()
        kept[document] = key not in contents
        contents.add(key)
    return kept


def log10_copies_bound(copies: int, rows: int, share: float) -> float:
    """Return log10 of the bound exp(-N·kl(m/N, p)) on the probability of m copies or more."""
    observed = copies / rows
    if observed <= share or share <= 0:
        return 0.0
    rest = 0.0 if observed >= 1 else (1 - observed) * math.log((1 - observed) / (1 - share))
    return -rows * (observed * math.log(observed / share) + rest) / math.log(10)


def _repeated_row_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report a row with more copies than the load of the layers explains."""
    hashes = table_row_hashes(table)
    usable = ~table.routed.unwritten & table.routed.mask[:, list(table.layers)].any(1)
    usable &= _original_document_mask(table, hashes)
    rows = np.flatnonzero(usable)
    if len(rows) < LEAST_COPIES:
        return
    values, counts = np.unique(hashes[rows], return_counts=True)
    best = values[counts.argmax()]
    copies = rows[hashes[rows] == best]
    run, begin = _longest_row_run(hashes, rows)
    if run >= LEAST_COPIES and run > len(copies) // 2:
        copies = rows[hashes[rows] == hashes[begin]]
    share, chance = len(copies) / len(rows), _log10_bound_of_copies(table, rows, copies)
    tokens = table.routes.tokens
    has_tokens = tokens is not None and bool((tokens[copies] >= 0).all())
    severity = _severity_of_copies(
        len(copies),
        run,
        share,
        chance,
        _copies_follow_tokens(tokens[rows], np.isin(rows, copies))
        if tokens is not None and has_tokens
        else None,
    )
    if severity is None:
        return
    evidence = {"share": share, "run": run, "log10_chance": chance, "row": int(copies[0])}
    reason = "stale-row" if has_tokens else "stale-row-or-token"
    yield RouteFinding(
        "repeated-rows", severity, "copies", len(copies), len(rows), reason, evidence
    )


def _log10_bound_of_copies(table: RouteTable, rows: np.ndarray, copies: np.ndarray) -> float:
    """Return log10 of the probability of so many equal rows, for independent layers."""
    share = 1.0
    for layer in table.layers:
        column = table.experts[:, layer]
        same = (column == column[copies[0]]).all(1)
        share *= float(same[rows].mean())
    return log10_copies_bound(len(copies), len(rows), share)


def _copies_follow_tokens(tokens: np.ndarray, is_copy: np.ndarray) -> bool:
    """Return whether 80 % of the copies are one token, or copies are mostly all of a token's rows.

    Args:
        tokens: token ids of the rows.
        is_copy: mask of the rows that are copies.
    """
    names = np.unique(tokens, return_inverse=True)[1]
    sizes, copies = np.bincount(names), np.bincount(names, is_copy)
    count = float(copies.sum())
    if copies.max() >= 0.8 * count:
        return True
    others = float((copies * (copies - 1) / np.maximum(sizes - 1, 1)).sum()) / count
    share = count / len(tokens)
    return others - share >= LEAST_TOKEN_SHARE * (1 - share) and share < 1


def _severity_of_copies(
    copies: int, run: int, share: float, chance: float, follow_tokens: bool | None
) -> Severity | None:
    """Return the severity of a row's copies; None if chance or repeated tokens explain them."""
    if copies < LEAST_COPIES or chance > LOG10_IMPROBABLE or follow_tokens:
        return None
    if follow_tokens is False:
        many = (copies >= 16 and share >= 0.05) or run >= 16
        return "unsound" if many else "suspicious" if run >= LEAST_COPIES else None
    if copies >= MANY_COPIES and share >= MANY_COPIES_SHARE and run >= LEAST_COPIES:
        return "unsound"
    return "suspicious" if run >= LEAST_COPIES or share >= MANY_COPIES_SHARE else None


def _longest_row_run(hashes: np.ndarray, rows: np.ndarray) -> tuple[int, int]:
    """Return length and first row of the longest run of consecutive equal rows."""
    changes = (np.diff(hashes[rows]).astype(bool) | (np.diff(rows) != 1)).astype(bool)
    cuts = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(rows)]])
    lengths = np.diff(cuts)
    longest = int(lengths.argmax())
    return int(lengths[longest]), int(rows[cuts[longest]])


def _weight_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report combine weights that are not finite, or whose sum is not that of the other tokens."""
    weights = table.routes.weights
    if weights is None:
        return
    mask = table.routed.mask & ~table.routed.unwritten[:, None]
    faults: dict[str, dict[int, np.ndarray]] = {"not-finite": {}, "other-sums": {}}
    for layer in table.layers:
        rows = np.flatnonzero(mask[:, layer])
        column = weights[rows, layer].astype(np.float64)
        finite = np.isfinite(column).all(1)
        faults["not-finite"][layer] = rows[~finite]
        faults["other-sums"][layer] = rows[finite][_rows_of_other_sums(column[finite])]
    for case, rows_by_layer in faults.items():
        wrong = {layer: rows for layer, rows in rows_by_layer.items() if len(rows)}
        if wrong:
            layer, rows = next(iter(wrong.items()))
            evidence = {
                "wrong": len(wrong),
                "layers": len(table.layers),
                "row": int(rows[0]),
                "layer": table.routes.names[layer],
                "value": [float(x) for x in weights[rows[0], layer][:8].round(6)],
            }
            count, total = sum(map(len, wrong.values())), int(mask[:, list(table.layers)].sum())
            yield RouteFinding("weights", "unsound", case, count, total, "torn-rows", evidence)


def _rows_of_other_sums(weights: np.ndarray) -> np.ndarray:
    """Return the rows whose sum is not that of nearly all; none where sums differ anyway.

    A row that is repeated, as in warm-up, makes no usual sum, and a weight of zero is a token that
    an expert at its capacity did not take.
    """
    sums = weights.sum(1)
    if len(sums) < LEAST_CONSTANT_ROWS or weights.shape[1] == 1:
        return np.zeros(0, np.int64)
    usual = float(np.median(sums))
    distance = np.abs(sums - usual) / max(abs(usual), 1e-9)
    equal = distance <= EQUAL_SUMS
    varied = len(np.unique(weights[equal][:SAMPLED_SUMS, 0])) >= LEAST_COPIES
    if not varied or equal.mean() < LEAST_USUAL_SHARE:
        return np.zeros(0, np.int64)
    return np.flatnonzero((distance >= OTHER_SUM) & (weights != 0).all(1))


def _dead_expert_findings(table: RouteTable) -> Iterator[RouteFinding]:
    """Report experts that no token chose, beyond chance."""
    loads = {}
    for layer in table.layers:
        ids = table.routed_ids(layer).ravel()
        size = table.n_experts or int(ids.max(initial=0)) + 1
        if size <= 1 << 17:  # ids outside of the experts have a finding of their own
            loads[layer] = np.bincount(ids[(ids >= 0) & (ids < size)], minlength=size)
    size = max((len(load) for load in loads.values()), default=0)
    dead = {}
    for layer, load in loads.items():
        full = np.zeros(size, np.int64)
        full[: len(load)] = load
        chosen = full[full > 0]
        if 0 < len(chosen) < size and int(chosen.min()) >= LEAST_EXPERT_LOAD:
            dead[layer] = np.flatnonzero(full == 0)
    if not dead:
        return
    count = sum(len(ids) for ids in dead.values())
    layer, ids = next(iter(dead.items()))
    block = _block_dead_in_all_layers(dead, len(table.layers), size)
    evidence = {
        "layers": len(dead),
        "least": LEAST_EXPERT_LOAD,
        "layer": table.routes.names[layer],
        "value": ids.tolist()[:8],
    }
    total = size * len(table.layers)
    if block:
        evidence |= {"first": block[0], "last": block[1]}
        severity, case, reason = "suspicious", "dead-block", "lost-rank"
    elif table.n_experts is None and _only_zero_is_dead_everywhere(dead, len(table.layers)):
        yield RouteFinding(
            "out-of-range", "suspicious", "from-one", size - 1, size, "from-one", evidence
        )
        return
    else:
        severity, case, reason = "note", "dead", "left-behind"
    yield RouteFinding("dead-experts", severity, case, count, total, reason, evidence)


def _only_zero_is_dead_everywhere(dead: dict[int, np.ndarray], layers: int) -> bool:
    """Whether expert 0 and no other is dead in each of several layers."""
    return 2 <= layers == len(dead) and all(ids.tolist() == [0] for ids in dead.values())


def _block_dead_in_all_layers(
    dead: dict[int, np.ndarray], layers: int, size: int
) -> tuple[int, int] | None:
    """Return first and last of consecutive experts that are dead in every layer, else None.

    A rank of expert parallelism holds such a block.
    """
    if len(dead) < layers or layers < 2:
        return None
    common = set(next(iter(dead.values())).tolist())
    for ids in dead.values():
        common &= set(ids.tolist())
    if len(common) < max(2, size // 64) or max(common) - min(common) + 1 != len(common):
        return None
    return min(common), max(common)
