"""Tables of a run: false alarms of sound pairs, power and hints of faults.

A refusal or error of `diff` counts as a false alarm of a sound pair and as a miss of a fault. Where
a precision is named wrongly to `diff` (`LOUDER_IS_NEUTRAL`), the conclusion that the noise is
larger than expected is neither: it is counted apart, as neutral; any other alarm is a false one.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks.blind.pairs import MODES, changes
from benchmarks.blind.precisions import LOUDER_IS_NEUTRAL

ALLOWED = 0.02
"""Share of false alarms that every kind is tested against."""

WORDS = (
    *("position", "rotary", "first", "last", "decode", "prefill", "document", "batch", "token"),
    *("embed", "rare", "common", "expert", "router", "row", "offset", "bias", "group", "layer"),
    *("lag", "shift", "number", "scores"),
)
"""Words of hints; a pattern whose kind has none of them is neutral."""

Line = dict[str, Any]


LOUDER = "noise larger than expected"


def is_neutral(line: Line) -> bool:
    """Whether noise was called larger than expected in a precision that was named wrongly."""
    return line["precision"] in LOUDER_IS_NEUTRAL and line.get("conclusion") == LOUDER


def false_alarm(line: Line) -> bool:
    """Whether a sound pair was called faulty, or could not be judged."""
    return "error" in line or (line["alarm"] and not is_neutral(line))


def is_found(line: Line) -> bool:
    """Whether a fault raised the alarm."""
    return "error" not in line and line["alarm"]


def hint(line: Line) -> str:
    """Return "right", "neutral" or "wrong" for the first pattern that is named for a fault."""
    right = changes()["faulty", line["change"]].hints
    for kind in line.get("patterns", [])[:1]:
        words = [word for word in WORDS if word in kind.lower()]
        if words:
            return "right" if any(word in right for word in words) else "wrong"
    return "neutral"


def upper_limit(count: int, total: int) -> float:
    """Return the one-sided 95 % limit of a share (Clopper-Pearson)."""
    return 1.0 if count == total else float(stats.beta.ppf(0.95, count + 1, total - count))


def excess(count: int, total: int) -> float:
    """Return P(X >= count), X binomial with the share that is allowed."""
    return float(stats.binom.sf(count - 1, total, ALLOWED))


def holm(p_values: list[float]) -> list[float]:
    """Return p-values corrected by Holm's method."""
    order = np.argsort(p_values)
    scaled = [(len(p_values) - rank) * p_values[index] for rank, index in enumerate(order)]
    corrected = np.minimum(np.maximum.accumulate(scaled), 1.0) if scaled else []
    result = [0.0] * len(p_values)
    for index, value in zip(order, corrected, strict=True):
        result[index] = float(value)
    return result


def show(header: dict[str, Any], lines: list[Line]) -> None:
    """Print all tables."""
    console = Console(width=140)
    title = f"{header['half']}{', second run' if header.get('again') else ''}"
    console.print(f"[bold]{title}[/bold], sources {header['hash']}")
    skipped = sorted({(x["kind"], x["skipped"]) for x in lines if "skipped" in x})
    for kind, reason in skipped:
        console.print(f"skipped: {kind}: {reason}")
    asked = [x for x in lines if "alarm" in x or "error" in x]
    sound = [x for x in asked if x["section"] == "sound"]
    for key in ("change", "kind", "mode"):
        console.print(alarm_table(f"False alarms, {title}", sound, key))
    console.print(f"neutral: {sum(map(is_neutral, sound))} of {len(sound)} sound pairs")
    stress = [x for x in asked if x["section"] == "stress"]
    console.print(alarm_table(f"False alarms under stress, {title}", stress, "change"))
    faulty = [x for x in asked if x["section"] == "faulty"]
    console.print(power_table(f"Power, {title}: found of those not exempt", faulty))
    _totals(console, [x for x in lines if "strength" in x], faulty)
    _seconds(console, lines)


def alarm_table(title: str, lines: list[Line], key: str) -> Table:
    """Return false alarms by a field, with one-sided 95 % limits and tests against 2 %."""
    table = Table(title=f"{title}, by {key}")
    for column in (key, "pairs", "alarms", "errors", "share", "95 % limit", "p > 2 %", "Holm"):
        table.add_column(column)
    groups = _grouped(lines, lambda line: line[key])
    counts = {name: (sum(map(false_alarm, group)), len(group)) for name, group in groups.items()}
    p_values = [excess(*count) for count in counts.values()]
    for (name, (count, total)), p, q in zip(counts.items(), p_values, holm(p_values), strict=True):
        errors = sum("error" in line for line in groups[name])
        table.add_row(name, *_shares(count, total, errors), f"{p:.3g}", f"{q:.3g}")
    count = sum(map(false_alarm, lines))
    if lines:
        errors = sum("error" in line for line in lines)
        table.add_row("all", *_shares(count, len(lines), errors), "", "", style="bold")
    return table


def _shares(count: int, total: int, errors: int) -> list[str]:
    share, limit = f"{count / total:.1%}", f"{upper_limit(count, total):.1%}"
    return [str(total), str(count), str(errors), share, limit]


def power_table(title: str, lines: list[Line]) -> Table:
    """Return what was found of each fault, by precision and mode, exempt pairs apart."""
    columns = ["float32 model", "bf16 model", "few bits model", *MODES[1:]]
    table = Table(title=title)
    for column in ("fault", *columns, "exempt", "right", "neutral", "wrong"):
        table.add_column(column)
    for name, group in {**_grouped(lines, lambda x: x["change"]), "all": lines}.items():
        strong = [line for line in group if not line["strength"]["exempt"]]
        cells = _grouped(strong, _column)
        powers = [_of(cells.get(column, [])) for column in columns]
        hints = [hint(line) for line in strong if is_found(line)]
        hint_counts = [str(hints.count(word)) for word in ("right", "neutral", "wrong")]
        table.add_row(name, *powers, str(len(group) - len(strong)), *hint_counts)
    return table


def _column(line: Line) -> str:
    if line["mode"] != "model":
        return line["mode"]
    exact = line["precision"] in ("float32", "bf16")
    return f"{line['precision'] if exact else 'few bits'} model"


def _of(lines: list[Line]) -> str:
    return f"{sum(map(is_found, lines))} of {len(lines)}" if lines else ""


def _totals(console: Console, weighed: list[Line], faulty: list[Line]) -> None:
    """Print exempt faults, and faults of unknown format that were called explained."""
    exempt = sorted({_fault(x) for x in weighed if x["strength"]["exempt"]})
    count = len({_fault(x) for x in weighed})
    console.print(f"exempt: {len(exempt)} of {count} (fault, kind, precision)")
    for fault, kind, precision in exempt:
        console.print(f"  {fault} · {kind} · {precision}")
    unknown = [x for x in faulty if x["mode"] == "unknown" and "conclusion" in x]
    explained = sum("explained" in x["conclusion"].lower() for x in unknown)
    console.print(f"unknown format: {explained} of {len(unknown)} faults called explained by ties")


def _fault(line: Line) -> tuple[str, str, str]:
    return line["change"], line["kind"], line["precision"]


def _seconds(console: Console, lines: list[Line]) -> None:
    timed = [x["seconds"] for x in lines if "seconds" in x]
    for stage in ("strength", "runs", "diff"):
        values = [seconds[stage] for seconds in timed]
        if values:
            mean, median = np.mean(values), np.median(values)
            console.print(f"CPU seconds per pair, {stage}: mean {mean:.2f}, median {median:.2f}")


def _grouped(lines: Iterable[Line], key: Any) -> dict[str, list[Line]]:
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[key(line)].append(line)
    return dict(groups)
