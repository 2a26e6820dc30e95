"""What a claim is, and how its test is turned into a verdict.

A test compares numbers. Each comparison (`Check`) belongs to one of three parts:

    paper        the statement as the paper makes it, over all that it speaks of
    condition    the statement where a condition that the paper does not state also holds
    corrected    what is true instead, or beside it

    all of `paper` passes                     holds
    else, all of `condition` passes           holds with a condition
    else                                      does not hold

A claim that needs what is not here has a reason for that instead, and the verdict says so; its
checks are then about what can be checked, such as the arithmetic of a table. Checks of `corrected`
never change the verdict: they must pass whatever it is, for they are our own word.

Comparisons that give checks; one with a number that is no number never passes.

near        |measured - reference| <= tolerance
within      |measured - reference| <= 4 standard errors, and they are small enough to mean something
at_most     measured <= reference + tolerance
at_least    measured >= reference - tolerance
none_of     a count of violations that must be zero

The data of a figure as plain dictionaries; `report` draws them and computes nothing.

chart    axes and series
line     a series drawn as a line
dots     a series drawn as points, with error bars if given
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import Tensor

from tieline.core.errors import require
from tieline.core.records import to_plain

__all__ = [
    "ERRORS",
    "Check",
    "Claim",
    "Evidence",
    "Outcome",
    "Part",
    "Real",
    "Run",
    "Verdict",
    "at_least",
    "at_most",
    "chart",
    "dots",
    "line",
    "near",
    "none_of",
    "within",
]

Part = Literal["paper", "condition", "corrected"]
Real = float | int
Value = Real | str | None


class Verdict(StrEnum):
    """How a statement fares."""

    HOLDS = "holds"
    CONDITION = "holds with a condition"
    FAILS = "does not hold"
    UNTESTABLE = "not testable here"


@dataclass(frozen=True)
class Run:
    """How much work a test may do, and what it draws.

    Attributes:
        fast: smaller samples: seconds per claim, with standard errors to match.
        seed: of everything that is drawn.
    """

    fast: bool = False
    seed: int = 0

    def size(self, fast: int, full: int) -> int:
        """The number of samples of the mode."""
        return fast if self.fast else full

    def generator(self, stream: int = 0) -> torch.Generator:
        """A generator of its own for each stream of a test."""
        return torch.Generator().manual_seed(1_000_003 * self.seed + stream)

    def normal(self, *shape: int, stream: int = 0) -> Tensor:
        """Standard normal draws in float64."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator(stream))


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what is compared, in words.
        measured: what was found.
        rule: "=", "<=", ">=".
        reference: what it is compared with.
        tolerance: how far off it may be.
        passed: whether it was not.
        part: the part of the verdict it belongs to.
    """

    name: str
    measured: float
    rule: Literal["=", "<=", ">="]
    reference: float
    tolerance: float
    passed: bool
    part: Part = "paper"


@dataclass(frozen=True)
class Evidence:
    """What a test found.

    Attributes:
        checks: the comparisons.
        paper: the paper's value or bound.
        corrected: the value that is right where the paper's is not, or sharper.
        measured: what was measured.
        figure: data of a figure (`studies.figure`), or None.
        note: a sentence on what the numbers say.
    """

    checks: Sequence[Check]
    paper: Value = None
    corrected: Value = None
    measured: Value = None
    figure: Mapping[str, Any] | None = None
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A statement of a paper.

    Attributes:
        id: `p<paper>-<kind><number>`, fit for the name of a file.
        paper: number of the paper.
        number: the statement's number in the paper.
        title: a few words.
        statement: what is claimed, in our words.
        tested: how it is tested.
        expected: the verdict of the ledger; another one is a change.
        test: gives the evidence.
        condition: the condition under which it holds, if there is one.
        untestable: why it cannot be tested here and what would test it, if so.
        seconds: about how long the fast test takes; the longest begin first.
    """

    id: str
    paper: int
    number: str
    title: str
    statement: str
    tested: str
    expected: Verdict
    test: Callable[[Run], Evidence]
    condition: str = ""
    untestable: str = ""
    seconds: Real = 0.2

    def describe(self) -> dict[str, Any]:
        """The record without its test, as JSON values."""
        shown = (f.name for f in fields(self) if f.name not in ("test", "seconds"))
        return {name: to_plain(getattr(self, name), words=True) for name in shown}

    def judge(self, evidence: Evidence) -> Verdict:
        """The verdict that the checks give."""
        if self.untestable:
            return Verdict.UNTESTABLE
        parts = {part: _passed(evidence, part) for part in ("paper", "condition")}
        if parts["paper"]:
            return Verdict.HOLDS
        return Verdict.CONDITION if parts["condition"] else Verdict.FAILS


@dataclass(frozen=True)
class Outcome:
    """The result of one claim: what is stored, shown and written.

    Attributes:
        claim: `Claim.describe()`.
        verdict: as judged; None if the test broke.
        changed: whether the verdict is not the expected one, or a check of ours failed.
        evidence: the evidence, as JSON values.
        seconds: how long the test took.
        fast: the mode.
        seed: the seed.
        error: what broke, if anything did.
    """

    claim: Mapping[str, Any]
    verdict: Verdict | None
    changed: bool
    evidence: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    fast: bool = False
    seed: int = 0
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON values: numbers that are not finite become words."""
        return to_plain(self, words=True)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Outcome":
        """The outcome that `to_dict` wrote."""
        verdict = values["verdict"]
        return cls(**{**values, "verdict": None if verdict is None else Verdict(verdict)})

    @classmethod
    def of(cls, claim: Claim, evidence: Evidence, run: Run, seconds: float) -> "Outcome":
        """Judge the evidence."""
        require(bool(evidence.checks), f"{claim.id}: a test without a check cannot fail")
        verdict = claim.judge(evidence)
        ours = all(check.passed for check in evidence.checks if check.part == "corrected")
        readable = all(_passed(evidence, part) is not False for part in _bound(claim, verdict))
        changed = verdict != claim.expected or not ours or not readable
        record = to_plain(evidence, words=True)
        return cls(claim.describe(), verdict, changed, record, seconds, run.fast, run.seed)


def _passed(evidence: Evidence, part: Part) -> bool | None:
    """Whether all checks of a part passed; None if there are none."""
    checks = [check.passed for check in evidence.checks if check.part == part]
    return all(checks) if checks else None


def _bound(claim: Claim, verdict: Verdict) -> tuple[Part, ...]:
    """Parts that must not fail besides those that the verdict already speaks of."""
    if verdict is Verdict.UNTESTABLE:
        return ("paper", "condition")
    return ("condition",) if verdict is Verdict.HOLDS else ()


ERRORS = 4.0
"""Standard errors that an estimate may be off; more happens once in 16,000 checks."""


def near(
    name: str, measured: Real, reference: Real, tolerance: Real = 1e-9, part: Part = "paper"
) -> Check:
    """The two agree to an absolute tolerance."""
    measured, reference = float(measured), float(reference)
    passed = measured == reference or abs(measured - reference) <= tolerance
    return Check(name, measured, "=", reference, float(tolerance), passed, part)


def within(
    name: str,
    measured: Real,
    stderr: Real,
    reference: Real,
    *,
    resolution: Real = 0.05,
    bias: Real = 0.0,
    part: Part = "paper",
) -> Check:
    """An estimate agrees with a reference within four of its standard errors.

    Args:
        name: what is compared.
        measured: the estimate.
        stderr: its standard error.
        reference: what it should be.
        resolution: largest ratio of standard error to reference; a vaguer estimate says nothing
            and does not pass.
        bias: known bias of the estimate or of the reference, added to the tolerance.
        part: the part of the verdict.
    """
    measured, reference, tolerance = (
        float(measured),
        float(reference),
        float(ERRORS * stderr + bias),
    )
    sharp = math.isfinite(stderr) and stderr <= resolution * max(abs(reference), abs(measured))
    passed = sharp and abs(measured - reference) <= tolerance
    return Check(name, measured, "=", reference, float(tolerance), passed, part)


def at_most(
    name: str, measured: Real, reference: Real, tolerance: Real = 0.0, part: Part = "paper"
) -> Check:
    """An upper bound."""
    passed = float(measured) <= float(reference) + tolerance
    return Check(name, float(measured), "<=", float(reference), float(tolerance), passed, part)


def at_least(
    name: str, measured: Real, reference: Real, tolerance: Real = 0.0, part: Part = "paper"
) -> Check:
    """A lower bound."""
    passed = float(measured) >= float(reference) - tolerance
    return Check(name, float(measured), ">=", float(reference), float(tolerance), passed, part)


def none_of(name: str, violations: Real, part: Part = "paper") -> Check:
    """Nothing violates the rule."""
    return near(name, float(violations), 0.0, 0.0, part)


Numbers = Sequence[Real] | Tensor
Scale = Literal["linear", "log"]


def chart(
    x: str,
    y: str,
    series: Sequence[dict[str, Any]],
    *,
    x_scale: Scale = "linear",
    y_scale: Scale = "linear",
) -> dict[str, Any]:
    """Axes by their titles and scales, with series."""
    axes = {"x": {"title": x, "scale": x_scale}, "y": {"title": y, "scale": y_scale}}
    return {**axes, "series": list(series)}


def line(name: str, x: Numbers, y: Numbers, *, dashed: bool = False) -> dict[str, Any]:
    """A line; the paper's own values are dashed by custom."""
    return {"name": name, "x": _list(x), "y": _list(y), "kind": "dashed" if dashed else "line"}


def dots(name: str, x: Numbers, y: Numbers, errors: Numbers | None = None) -> dict[str, Any]:
    """Points, with their standard errors."""
    bars = None if errors is None else _list(errors)
    return {"name": name, "x": _list(x), "y": _list(y), "kind": "dots", "errors": bars}


def _list(values: Numbers) -> list[Any]:
    numbers = values if isinstance(values, Tensor) else [float(value) for value in values]
    return to_plain(numbers, words=True)
