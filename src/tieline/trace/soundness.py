"""Whether a file of routes is sound: what arrays that went wrong look like.

Each finding names what was found, how often, where first, and the likely cause from reports of
people who met it. Severities:

    unsound      no router of a sound run writes this
    suspicious   sound runs write this now and then: look at it
    note         what the reader should know: a dense layer, a last token without a row

    all-zero          zeros in all ids, or in rows that should have been written
    repeated-rows     one row more often than routing explains
    duplicate-expert  an expert twice in one token
    out-of-range      ids that no expert has
    constant-layer    a layer that is dense, constant, or unlike the others
    row-count         rows that do not fit the tokens
    token-shift       rows that belong to other tokens (also `trace.agreement`)
    layer-shift       layers in other places (`trace.agreement`)
    dead-experts      experts that no token chose, beyond chance

**Repeated rows.** A row that stands m times among N, in layers whose choices have the shares f_l of
what it holds, would by chance stand N·Π f_l times; P(≥ m copies) ≤ exp(-N·kl(m/N, Π f_l)), which
the message states. Layers are not independent, and a repeated token repeats its row: copies that
share one token are no finding, and a few copies are at most suspicious.

**Dead experts.** Chosen experts with at least 5 tokens each, and others with none: an expert of a
fifth of the least load seen would still be missed with probability e^-1 only. With fewer tokens
nothing is said.

Everything runs layer by layer, so that memory stays at a few columns.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tieline.trace.readers.routes import Routed, Routes, routed

Kind = Literal[
    "all-zero",
    "repeated-rows",
    "duplicate-expert",
    "out-of-range",
    "constant-layer",
    "row-count",
    "layer-shift",
    "token-shift",
    "dead-experts",
]
Severity = Literal["unsound", "suspicious", "note"]

LEAST_COPIES, MANY_COPIES, MANY_SHARE = 8, 32, 0.3
LEAST_CONSTANT = 64
LEAST_SEEN = 5
LARGEST_LAG = 8
IMPROBABLE = -9.0
"""log10 of the probability below which copies are not by chance."""


@dataclass(frozen=True)
class Finding:
    """Something that was found in a file of routes.

    Attributes:
        kind: what it is.
        severity: "unsound", "suspicious" or "note".
        message: one sentence with the numbers.
        count: how many rows, tokens, layers or experts it concerns.
        total: of how many.
        where: the first place, and what stands there.
        cause: the likely cause, and what to do.
        file: name of the file, where several were checked.
    """

    kind: Kind
    severity: Severity
    message: str
    count: int
    total: int
    where: str = ""
    cause: str = ""
    file: str = ""


@dataclass(frozen=True)
class Sheet:
    """Routes with what every test needs.

    Attributes:
        routes: the routes.
        found: where something was routed.
        layers: places of the layers that are not dense.
        documents: document of each row.
        n_experts: number of experts that is known; None if it is not.
    """

    routes: Routes
    found: Routed
    layers: tuple[int, ...]
    documents: np.ndarray
    n_experts: int | None

    @property
    def experts(self) -> np.ndarray:
        """Ids (rows, layers, k)."""
        return self.routes.experts

    def column(self, place: int) -> np.ndarray:
        """Ids (routed rows, k) of a layer."""
        mask = self.found.mask[:, place]
        column = self.experts[:, place]
        return column if mask.all() else column[mask]


def sheet_of(routes: Routes, n_experts: int | None = None) -> Sheet:
    """Return routes with the layers and rows in which something was routed."""
    stated = routes.n_experts if n_experts is None else n_experts
    found = routed(routes.experts, stated)
    layers = tuple(x for x in range(routes.experts.shape[1]) if x not in found.dense)
    documents = routes.documents
    if documents is None:
        documents = np.zeros(len(routes.experts), np.int64)
    return Sheet(routes, found, layers, documents, stated)


def findings(routes: Routes, n_experts: int | None = None) -> list[Finding]:
    """Return what is wrong with routes, by themselves and by the tokens that they name.

    Args:
        routes: what a reader returned.
        n_experts: number of experts E, if it is known.
    """
    sheet = sheet_of(routes, n_experts)
    nothing = list(_all_nothing(sheet))
    if nothing:
        return nothing
    tests = (
        _row_counts,
        _unwritten,
        _dense_layers,
        _out_of_range,
        _duplicates,
        _constant_layers,
        _repeated_rows,
        _token_shift,
        _dead_experts,
    )
    return [finding for test in tests for finding in test(sheet)]


def _all_nothing(sheet: Sheet) -> Iterator[Finding]:
    ids, (rows, layers, k) = sheet.experts, sheet.experts.shape
    if k == 1 and rows * layers < 16:
        return
    for value in (0, -1):
        if ids.dtype.kind == "u" and value < 0:
            continue
        if int(ids.min()) == value == int(ids.max()):
            yield Finding(
                "all-zero",
                "unsound",
                f"all {ids.size} ids are {value}: no routes were written",
                rows,
                rows,
                cause="a fused or captured kernel that returns no choice leaves the buffer as it "
                "was made (vllm 54730, 44116): turn the fused path off, or update the engine",
            )
            return


def _row_counts(sheet: Sheet) -> Iterator[Finding]:
    routes = sheet.routes
    if routes.problems:
        first = routes.problems[0]
        yield Finding(
            "row-count",
            "unsound",
            f"{len(routes.problems)} documents have rows that do not fit their tokens: "
            f"{first.words}",
            len(routes.problems),
            int(sheet.documents.max()) + 1,
            f"document {first.document}: {first.rows} rows, {first.tokens} tokens",
            "rows of a turn where those of the whole request are needed, or of several requests "
            "(strands-sglang 72)",
        )
    if routes.ends:
        yield Finding(
            "row-count",
            "note",
            f"the last token of {routes.ends} documents has no row, as engines write it",
            routes.ends,
            int(sheet.documents.max()) + 1,
        )


def _ends(sheet: Sheet) -> tuple[np.ndarray, np.ndarray]:
    """Unwritten rows at the beginning and at the end of their documents."""
    blank, documents = sheet.found.unwritten, sheet.documents
    cuts = np.flatnonzero(np.diff(documents)) + 1
    first, last = np.zeros_like(blank), np.zeros_like(blank)
    for part in np.split(np.arange(len(blank)), cuts) if blank.any() else ():
        filled = np.flatnonzero(~blank[part])
        first[part[: filled[0] if len(filled) else len(part)]] = True
        last[part[filled[-1] + 1 if len(filled) else len(part) :]] = True
    return first & blank, last & blank


def _unwritten(sheet: Sheet) -> Iterator[Finding]:
    blank = sheet.found.unwritten
    count, total = int(blank.sum()), len(blank)
    if not count:
        return
    first, last = _ends(sheet)
    documents = len(np.unique(sheet.documents))
    inside = int((blank & ~first & ~last).sum())
    batch = sheet.routes.producer in ("verl", "slime", "miles")
    where = f"row {int(blank.argmax())}"
    if inside or (first.any() and not batch):
        severity, words = "unsound", f"{inside} of them between written rows"
        cause = (
            "rows that a kernel, a cached prefix or a dropped step did not write; replayed, they "
            "send tokens to expert 0 (verl: placeholders read as expert 0)"
        )
    elif int(last.sum()) <= documents:
        severity, words = "note", "each the last of its document"
        cause = "the last token of a request has no route: leave these rows out"
    else:
        severity, words = ("note" if batch else "suspicious"), "at the ends of documents"
        cause = "padding, or steps of generation that returned nothing: pass the tokens to tell"
    yield Finding(
        "all-zero",
        severity,
        f"{count} of {total} rows are zero in every layer ({words}): nothing was written there",
        count,
        total,
        where,
        cause,
    )
    if severity != "note":
        yield Finding(
            "duplicate-expert",
            severity,
            f"read as ids, {count} rows name expert 0 {sheet.experts.shape[2]} times",
            count,
            total,
            where,
            "zeros that stand for nothing: a replay must not take them for expert 0",
        )


def _dense_layers(sheet: Sheet) -> Iterator[Finding]:
    dense, names = sheet.found.dense, sheet.routes.names
    if dense:
        told = ", ".join(f"{names[place]} ({why})" for place, why in list(dense.items())[:4])
        yield Finding(
            "constant-layer",
            "note",
            f"{len(dense)} of {len(names)} layers are not routed: {told}",
            len(dense),
            len(names),
            f"layer {names[next(iter(dense))]}",
            "dense layers of the model; if the model routes there, the layer was not written. The "
            "layer axis counts all layers: consumers that count routed ones must skip these "
            "(verl 5037)",
        )


def _out_of_range(sheet: Sheet) -> Iterator[Finding]:
    ids, most = sheet.experts, sheet.n_experts
    limit = np.iinfo(ids.dtype).max
    if most is not None and most - 1 > limit:
        yield Finding(
            "out-of-range",
            "unsound",
            f"{ids.dtype} holds ids up to {limit}, the model has {most} experts: ids wrapped round",
            ids.size,
            ids.size,
            cause="the array was written in too small a type",
        )
    tops = {place: int(sheet.column(place).max(initial=0)) for place in sheet.layers}
    wrong = _wrong_ids(sheet, most)
    if wrong:
        yield _range_finding(sheet, wrong, tops, most)
    elif most is None and len(tops) >= 3:
        ordered = sorted(tops, key=lambda place: tops[place])
        top, second = tops[ordered[-1]], tops[ordered[-2]]
        enough = len(ids) * ids.shape[2] >= 8 * (second + 1)
        if enough and second >= 3 and top + 1 >= 1.5 * (second + 1):
            yield Finding(
                "out-of-range",
                "suspicious",
                f"layer {sheet.routes.names[ordered[-1]]} has ids up to {top}, all others up to "
                f"{second}",
                1,
                len(tops),
                cause="a draft model wrote into the layer (vllm 48622, sglang 26980); pass "
                "n_experts to be sure",
            )


def _wrong_ids(sheet: Sheet, most: int | None) -> dict[int, tuple[int, int, int]]:
    """Tokens with an id that no expert has, by layer: how many, the first row, the id."""
    wrong = {}
    for place in sheet.layers:
        column = sheet.column(place)
        signed = column.dtype.kind == "i" and int(column.min(initial=0)) < 0
        if not signed and (most is None or int(column.max(initial=0)) < most):
            continue
        bad = (column < 0) if most is None else (column < 0) | (column >= most)
        rows = np.flatnonzero(sheet.found.mask[:, place])[np.flatnonzero(bad.any(1))]
        if len(rows):
            first = sheet.experts[rows[0], place]
            odd = first[(first < 0) | (first >= (most or np.iinfo(first.dtype).max))]
            wrong[place] = len(rows), int(rows[0]), int(odd[0])
    return wrong


def _range_finding(
    sheet: Sheet,
    wrong: dict[int, tuple[int, int, int]],
    tops: dict[int, int],
    most: int | None,
) -> Finding:
    count = sum(number for number, _, _ in wrong.values())
    total = len(sheet.experts) * len(sheet.layers)
    place = next(iter(wrong))
    several = len(wrong) > max(1, len(sheet.layers) // 2)
    highest = max(tops[layer] for layer in wrong)
    if any(value < 0 for _, _, value in wrong.values()):
        cause = "some ids of a token are -1 and others are not: rows of two arrays were mixed"
    elif several and most is not None and highest < 2 * most:
        cause = (
            "ids of physical experts after load balancing (EPLB), which counts redundant copies: "
            "map them to logical ones before they leave the engine"
        )
    elif not several:
        cause = (
            f"{len(wrong)} of {len(sheet.layers)} layers: a draft model, or another head, wrote "
            "into them (vllm 48622, sglang 26980)"
        )
    else:
        cause = "another model's routes, or an array of another type read as this one"
    _, row, value = wrong[place]
    return Finding(
        "out-of-range",
        "unsound",
        f"{count} choices have an id outside 0 ... {'E' if most is None else most} - 1, in "
        f"{len(wrong)} of {len(sheet.layers)} layers",
        count,
        total,
        f"row {row}, layer {sheet.routes.names[place]}: {value}",
        cause,
    )


def _duplicates(sheet: Sheet) -> Iterator[Finding]:
    k = sheet.experts.shape[2]
    if k == 1:
        return
    found, zeros = {}, 0
    for place in sheet.layers:
        column = sheet.column(place)
        ordered = np.sort(column, axis=1)
        twice = ordered[:, 1:] == ordered[:, :-1]
        rows = np.flatnonzero(twice.any(1))
        if len(rows):
            kept = np.flatnonzero(sheet.found.mask[:, place])[rows[0]]
            found[place] = len(rows), int(kept), column[rows[0]].tolist()
            zeros += int(((ordered[rows] == 0).sum(1) > 1).sum())
    if not found:
        return
    count = sum(number for number, _, _ in found.values())
    place = next(iter(found))
    _, row, ids = found[place]
    if zeros == count:
        cause = "zeros that stand for nothing, read as expert 0 (verl: placeholders)"
    elif len(found) == 1 and len(sheet.layers) > 1:
        cause = "one layer alone: another head or a draft model wrote into it"
    else:
        cause = "rows of two tokens or arrays were mixed, or ids were cast to too small a type"
    yield Finding(
        "duplicate-expert",
        "unsound",
        f"{count} choices name an expert twice, in {len(found)} of {len(sheet.layers)} layers",
        count,
        len(sheet.experts) * len(sheet.layers),
        f"row {row}, layer {sheet.routes.names[place]}: {ids[:8]}",
        cause,
    )


def codes_of(column: np.ndarray) -> np.ndarray:
    """Return a number for each row that equal rows share (64-bit hashes)."""
    code = np.full(len(column), 1469598103934665603, np.uint64)
    for rank in range(column.shape[1]):
        code ^= column[:, rank].astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        code *= np.uint64(1099511628211)
        code ^= code >> np.uint64(29)
    return code


def _constant_layers(sheet: Sheet) -> Iterator[Finding]:
    """Layers that one choice fills, and layers that use the first experts alone."""
    distinct, tops, alive = {}, {}, {}
    for place in sheet.layers:
        column = sheet.column(place)
        same = bool((column == column[:1]).all())
        distinct[place] = 1 if same else min(len(np.unique(codes_of(column[:4096]))), 4096)
        counts = np.bincount(column.ravel()[: 1 << 22].clip(min=0))
        tops[place], alive[place] = len(counts), int((counts > 0).sum())
    others = sorted(distinct.values())
    usual = others[len(others) // 2]
    names, rows = sheet.routes.names, len(sheet.experts)
    for place, number in distinct.items():
        if number == 1 and usual > 1 and rows >= LEAST_CONSTANT // 4:
            sure = rows >= LEAST_CONSTANT and usual >= 8 and sheet.experts.shape[2] > 1
            yield Finding(
                "constant-layer",
                "unsound" if sure else "suspicious",
                f"layer {names[place]} has {sheet.column(place)[0].tolist()[:8]} in all of its "
                f"{rows} rows; other layers have {usual} choices or more",
                rows,
                rows,
                f"layer {names[place]}",
                "a buffer that was written once, or a layer that another program filled",
            )
    yield from _narrow_layers(sheet, tops, {x for x in tops if alive[x] >= 0.9 * tops[x]})


def _narrow_layers(sheet: Sheet, tops: dict[int, int], full: set[int]) -> Iterator[Finding]:
    """Layers that use the first experts alone, all of them, where the others use all."""
    widest, (rows, _, k) = max(tops.values()), sheet.experts.shape
    for place, top in tops.items():
        others = all(tops[x] >= 0.9 * widest for x in tops if x != place)
        narrow = 1 < top <= widest / 2 and widest - top >= 8 and place in full
        if len(tops) > 2 and rows * k >= 10 * widest and others and narrow:
            name = sheet.routes.names[place]
            yield Finding(
                "constant-layer",
                "suspicious",
                f"layer {name} uses experts 0 ... {top - 1} alone, all other layers up to "
                f"{widest - 1}: it is unlike them",
                1,
                len(tops),
                f"layer {name}",
                "a draft model with fewer experts wrote into it (vllm 48622, sglang 26980)",
            )


def _row_codes(sheet: Sheet) -> np.ndarray:
    """A number for each row over all routed layers."""
    code = np.zeros(len(sheet.experts), np.uint64)
    for place in sheet.layers:
        code = (code * np.uint64(0x9E3779B97F4A7C15)) ^ codes_of(sheet.experts[:, place])
    return code


def _first_documents(sheet: Sheet, codes: np.ndarray) -> np.ndarray:
    """Rows of documents that are no copies of an earlier one."""
    documents = sheet.documents
    cuts = np.flatnonzero(np.diff(documents)) + 1
    kept, seen = np.ones(len(codes), bool), set()
    if len(cuts) == 0:
        return kept
    for part in np.split(np.arange(len(codes)), cuts):
        key = codes[part].tobytes()
        kept[part] = key not in seen
        seen.add(key)
    return kept


def log10_chance(copies: int, rows: int, share: float) -> float:
    """Return log10 of the bound exp(-N·kl(m/N, p)) on the probability of m copies or more."""
    part = copies / rows
    if part <= share or share <= 0:
        return 0.0
    rest = 0.0 if part >= 1 else (1 - part) * math.log((1 - part) / (1 - share))
    return -rows * (part * math.log(part / share) + rest) / math.log(10)


def _repeated_rows(sheet: Sheet) -> Iterator[Finding]:
    codes = _row_codes(sheet)
    usable = ~sheet.found.unwritten & sheet.found.mask[:, list(sheet.layers)].any(1)
    usable &= _first_documents(sheet, codes)
    rows = np.flatnonzero(usable)
    if len(rows) < LEAST_COPIES:
        return
    values, counts = np.unique(codes[rows], return_counts=True)
    best = values[counts.argmax()]
    copies = rows[codes[rows] == best]
    run, begin = _longest_run(codes, rows)
    if run >= LEAST_COPIES and run > len(copies) // 2:
        copies = rows[codes[rows] == codes[begin]]
    share, chance = len(copies) / len(rows), _chance(sheet, rows, copies)
    tokens = sheet.routes.tokens
    known = tokens is not None and bool((tokens[copies] >= 0).all())
    severity = _severity(len(copies), run, share, chance, _one_token(tokens, copies, known))
    if severity is None:
        return
    yield Finding(
        "repeated-rows",
        severity,
        f"one row stands {len(copies)} times among {len(rows)} ({100 * share:.3g} %), "
        f"{run} times in a row; by chance with probability 10^{chance:.0f} at most under the "
        f"load of the layers",
        len(copies),
        len(rows),
        f"row {int(copies[0])}",
        "a stale row in padded or skipped steps (sglang 36404)"
        + ("" if known else "; or a token that is repeated: pass the tokens to tell"),
    )


def _chance(sheet: Sheet, rows: np.ndarray, copies: np.ndarray) -> float:
    """log10 of the chance that as many rows are equal, layers independent."""
    share = 1.0
    for place in sheet.layers:
        column = sheet.experts[:, place]
        same = (column == column[copies[0]]).all(1)
        share *= float(same[rows].mean())
    return log10_chance(len(copies), len(rows), share)


def _one_token(tokens: np.ndarray | None, copies: np.ndarray, known: bool) -> bool | None:
    """Whether nearly all copies belong to one token; None if tokens are not known."""
    if not known or tokens is None:
        return None
    _, counts = np.unique(tokens[copies], return_counts=True)
    return bool(counts.max() >= 0.8 * len(copies))


def _severity(
    copies: int, run: int, share: float, chance: float, one_token: bool | None
) -> Severity | None:
    if copies < LEAST_COPIES or chance > IMPROBABLE or one_token:
        return None
    if one_token is False:
        many = (copies >= 16 and share >= 0.05) or run >= 16
        return "unsound" if many else "suspicious" if run >= LEAST_COPIES else None
    if copies >= MANY_COPIES and share >= MANY_SHARE and run >= LEAST_COPIES:
        return "unsound"
    return "suspicious" if run >= LEAST_COPIES or share >= MANY_SHARE else None


def _longest_run(codes: np.ndarray, rows: np.ndarray) -> tuple[int, int]:
    """Length and first row of the longest run of equal rows that follow each other."""
    same = (np.diff(codes[rows]).astype(bool) | (np.diff(rows) != 1)).astype(bool)
    cuts = np.concatenate([[0], np.flatnonzero(same) + 1, [len(rows)]])
    lengths = np.diff(cuts)
    longest = int(lengths.argmax())
    return int(lengths[longest]), int(rows[cuts[longest]])


def _token_shift(sheet: Sheet) -> Iterator[Finding]:
    """Rows that fit the tokens better at another place: equal tokens choose alike in layer one."""
    tokens, k = sheet.routes.tokens, sheet.experts.shape[2]
    if tokens is None or bool((tokens < 0).any()) or not sheet.layers or len(tokens) < 256:
        return
    tokens, documents = tokens[: 1 << 17], sheet.documents[: 1 << 17]
    column = np.sort(sheet.experts[: 1 << 17, sheet.layers[0]], axis=1)
    codes = np.unique(codes_of(column), return_inverse=True)[1]
    written = sheet.found.mask[: 1 << 17, sheet.layers[0]]
    _, shares = np.unique(codes, return_counts=True)
    chance = float(((shares / shares.sum()) ** 2).sum())
    alike = {
        lag: _alike(tokens, codes, documents, written, lag)
        for lag in range(-LARGEST_LAG, LARGEST_LAG + 1)
    }
    here, pairs = alike[0]
    best = max(alike, key=lambda lag: alike[lag][0])
    error = math.sqrt(max(chance, 1e-3) / max(pairs, 1))
    gain, own = alike[best][0] - chance, here - chance
    if best == 0 or pairs < 128 or gain < 8 * error or own > 0.5 * gain:
        return
    yield Finding(
        "token-shift",
        "unsound",
        f"equal tokens choose alike in {100 * alike[best][0]:.3g} % of pairs if rows are moved by "
        f"{-best:+d}, in {100 * here:.3g} % as they are ({100 * chance:.3g} % by chance)",
        len(tokens),
        len(tokens),
        f"layer {sheet.routes.names[sheet.layers[0]]}, k={k}",
        f"row t belongs to token t{best:+d}: rows of the token before or after, or of another "
        "request that begins elsewhere (miles 3277)",
    )


def _alike(
    tokens: np.ndarray, codes: np.ndarray, documents: np.ndarray, written: np.ndarray, lag: int
) -> tuple[float, int]:
    """Share of pairs of equal tokens that choose alike if row t belongs to token t + lag.

    A mean over tokens that come again, weighted by how often they do, so that a run of one token
    does not outweigh all others. Also the number of their rows.
    """
    length = len(tokens)
    rows = np.arange(max(0, -lag), min(length, length - lag))
    rows = rows[(documents[rows] == documents[rows + lag]) & written[rows]]
    if len(rows) < 2:
        return 0.0, 0
    names = np.unique(tokens[rows + lag], return_inverse=True)[1].astype(np.int64)
    counts = np.bincount(names).astype(float)
    both, same = np.unique(names * (int(codes.max()) + 1) + codes[rows], return_counts=True)
    owner = both // (int(codes.max()) + 1)
    agreed = np.bincount(owner, same * (same - 1.0), minlength=len(counts))
    again = counts > 1
    share = agreed[again] / (counts[again] - 1)  # n · P(two of them choose alike)
    total = float(counts[again].sum())
    return (float(share.sum()) / total if total else 0.0), int(total)


def _dead_experts(sheet: Sheet) -> Iterator[Finding]:
    loads = {}
    for place in sheet.layers:
        column = sheet.column(place)
        top = int(column.max(initial=0)) + 1
        size = max(top, sheet.n_experts or 0)
        if size <= 1 << 17:
            loads[place] = np.bincount(column.ravel().clip(min=0), minlength=size)
    size = max((len(load) for load in loads.values()), default=0)
    dead = {}
    for place, load in loads.items():
        full = np.zeros(size, np.int64)
        full[: len(load)] = load
        seen = full[full > 0]
        if 0 < len(seen) < size and int(seen.min()) >= LEAST_SEEN:
            dead[place] = np.flatnonzero(full == 0)
    if not dead:
        return
    count = sum(len(ids) for ids in dead.values())
    place, ids = next(iter(dead.items()))
    block = _common_block(dead, len(sheet.layers), size)
    yield Finding(
        "dead-experts",
        "suspicious" if block else "note",
        f"{count} experts of {len(dead)} layers are chosen by no token, while every other expert "
        f"of their layers is by {LEAST_SEEN} or more"
        + (f"; in all layers it is experts {block[0]} ... {block[1]}" if block else ""),
        count,
        size * len(sheet.layers),
        f"layer {sheet.routes.names[place]}: {ids.tolist()[:8]}",
        "choices of one expert-parallel rank are lost"
        if block
        else "experts that training left behind, or a text that does not reach them",
    )


def _common_block(dead: dict[int, np.ndarray], layers: int, size: int) -> tuple[int, int] | None:
    """A block of experts, as one rank has them, that is dead in every layer."""
    if len(dead) < layers or layers < 2:
        return None
    common = set(next(iter(dead.values())).tolist())
    for ids in dead.values():
        common &= set(ids.tolist())
    if len(common) < max(2, size // 64) or max(common) - min(common) + 1 != len(common):
        return None
    return min(common), max(common)


def worst(found: Sequence[Finding]) -> Severity | None:
    """Return the gravest severity among findings; None without any."""
    for severity in ("unsound", "suspicious", "note"):
        if any(finding.severity == severity for finding in found):
            return severity
    return None
