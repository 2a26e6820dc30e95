"""A claim of a paper, its test's evidence, and the verdict that the evidence gives.

A test compares numbers (`claims.checks`). Each comparison (`Check`) belongs to one of three parts:

    paper        the statement as the paper makes it, in all its generality
    condition    the statement under a condition that the paper does not state
    corrected    what is true instead, or in addition

    fewer than 90 % of the fits converged     undecided
    all of `paper` passes                     holds
    else, if it is open                       undecided
    else, all of `condition` passes           holds with a condition
    else, if that is open                     undecided
    else                                      does not hold

A check is open if it decides nothing: its interval reaches across a limit, its standard error is
too large, or what it asks for was not measured. A part is open if one of its checks is open and
none fails.

A claim that cannot be tested here states the reason, and the verdict says so; its checks then cover
what can be checked, such as the arithmetic of a table. Checks of `corrected` do not decide the
verdict, but they are our own statements: one that fails or is open marks the claim as changed.

`chart`, `line` and `dots` make the data of a claim's figure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from tieline.core.errors import require

__all__ = [
    "Check",
    "Claim",
    "ClaimOutcome",
    "ClaimRun",
    "Evidence",
    "FigureAxis",
    "FigureData",
    "FigureSeries",
    "Fits",
    "Part",
    "Real",
    "Value",
    "Verdict",
    "chart",
    "dots",
    "line",
]

Part = Literal["paper", "condition", "corrected"]
Real = float | int
Value = Real | str | None


class Verdict(StrEnum):
    """Whether a statement holds."""

    HOLDS = "holds"
    CONDITION = "holds with a condition"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    UNTESTABLE = "not testable here"


@dataclass(frozen=True)
class ClaimRun:
    """Sample sizes and random numbers of a test.

    Attributes:
        fast: use smaller samples: seconds per claim, with larger standard errors.
        seed: of all random numbers.
    """

    fast: bool = False
    seed: int = 0

    @property
    def mode(self) -> str:
        """Name of the mode: "fast" or "full"."""
        return "fast" if self.fast else "full"

    def size(self, fast: int, full: int) -> int:
        """Return the number of samples of the mode."""
        return fast if self.fast else full

    def generator(self, stream: int = 0) -> torch.Generator:
        """Return an independent generator for each stream of a test."""
        return torch.Generator().manual_seed(1_000_003 * self.seed + stream)

    def normal(self, *shape: int, stream: int = 0) -> Tensor:
        """Draw standard normal numbers in float64."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator(stream))


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what is compared.
        measured: the measured number.
        rule: "=", "<=", ">=".
        reference: the number it is compared with.
        tolerance: the largest allowed deviation.
        passed: whether the comparison holds; False if it is open.
        part: the part of the verdict it belongs to.
        open: why it decides nothing; empty if it decides.
        low: lower end of the 95 % interval of what was measured, if there is one; the name says so
            if the level is another.
        high: its upper end.
    """

    name: str
    measured: float
    rule: Literal["=", "<=", ">="]
    reference: float
    tolerance: float
    passed: bool
    part: Part = "paper"
    open: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class FigureAxis:
    """Title and scale ("linear" or "log") of an axis."""

    title: str
    scale: str


@dataclass(frozen=True)
class FigureSeries:
    """Points of a chart; `kind` is "line", "dashed" or "dots", `errors` are standard errors."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: str
    errors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class FigureData:
    """The data of a claim's figure."""

    x: FigureAxis
    y: FigureAxis
    series: tuple[FigureSeries, ...]


CONVERGED_SHARE = 0.9
"""Share of fits that must have converged for a claim to be decided by them."""


@dataclass(frozen=True)
class Fits:
    """Fits that the evidence rests on, and how many of them converged."""

    converged: int
    total: int

    def __str__(self) -> str:
        return f"{self.converged} of {self.total} fits converged"

    @property
    def enough(self) -> bool:
        """Whether they can decide a claim."""
        return self.converged >= CONVERGED_SHARE * self.total


@dataclass(frozen=True)
class Evidence:
    """The result of a test.

    Attributes:
        checks: the comparisons.
        paper: the paper's value or bound.
        corrected: the correct or sharper value, where the paper's is not.
        measured: the measured value.
        figure: the data of a figure, or None.
        note: a sentence that interprets the numbers.
        fits: the fits that it rests on, if there are any.
    """

    checks: Sequence[Check]
    paper: Value = None
    corrected: Value = None
    measured: Value = None
    figure: FigureData | None = None
    note: str = ""
    fits: Fits | None = None

    @classmethod
    def of(cls, *checks: Check | Sequence[Check], **fields: Any) -> "Evidence":
        """Collect checks and lists of checks, such as those of `checks.corrected`."""
        nested = ([check] if isinstance(check, Check) else check for check in checks)
        return cls(tuple(chain.from_iterable(nested)), **fields)

    def passed(self, part: Part) -> bool | None:
        """Return whether all checks of a part passed, None if there are none."""
        results = [check.passed for check in self.checks if check.part == part]
        return all(results) if results else None

    def open(self, part: Part) -> str:
        """Return why a part decides nothing; empty if it passes, fails or has no checks."""
        failed = [check for check in self.checks if check.part == part and not check.passed]
        reasons = dict.fromkeys(f"{check.name}: {check.open}" for check in failed)
        return "; ".join(reasons) if all(check.open for check in failed) else ""

    @property
    def unfinished(self) -> str:
        """Why the fits decide nothing; empty if enough of them converged."""
        return "" if self.fits is None or self.fits.enough else f"only {self.fits}"


FULL_OVER_FAST = 2.2
"""Duration of the full mode over that of the fast one, over all claims that train nothing."""


def _no_test(run: ClaimRun) -> Evidence:
    raise NotImplementedError("this claim was read from a file, which holds no test")


@dataclass(frozen=True)
class Claim:
    """A statement of a paper.

    Attributes:
        id: `p<paper>-<kind><number>`, usable as a file name.
        paper: number of the paper.
        number: the statement's number in the paper.
        title: a few words.
        statement: the paper's sentence in our words.
        setting: the setting in which it is tested: exact or over-specified, sparse or dense, which
            loss, bound or equality, theorem or assumption, sizes.
        tested: how it is tested.
        overturned_by: what would change the verdict.
        expected: the verdict of the ledger; any other one is a change.
        condition: the condition under which it holds, if there is one.
        untestable: why it cannot be tested here and what would test it, if so.
        undecided: why the ledger does not decide it, if so.
        test: computes the evidence.
        seconds: approximate duration of the fast test; the longest tests start first.
        full_seconds: that of the full test; None for `FULL_OVER_FAST` times `seconds`.
        together: a name shared by claims that rest on one study; one process tests them.
    """

    id: str
    paper: int
    number: str
    title: str
    statement: str
    setting: str
    tested: str
    overturned_by: str
    expected: Verdict
    condition: str = ""
    untestable: str = ""
    undecided: str = ""
    test: Callable[[ClaimRun], Evidence] = field(
        default=_no_test, repr=False, compare=False, metadata={"json": False}
    )
    seconds: Real = field(default=0.2, repr=False, compare=False, metadata={"json": False})
    full_seconds: Real | None = field(
        default=None, repr=False, compare=False, metadata={"json": False}
    )
    together: str = field(default="", repr=False, compare=False, metadata={"json": False})

    def duration(self, fast: bool) -> float:
        """Return about how many seconds the test takes in a mode, on one core."""
        full = FULL_OVER_FAST * self.seconds if self.full_seconds is None else self.full_seconds
        return float(self.seconds if fast else full)

    def judge(self, evidence: Evidence) -> tuple[Verdict, str]:
        """Return the verdict of the checks and, if they decide nothing, the reason."""
        if self.untestable:
            return Verdict.UNTESTABLE, ""
        if evidence.unfinished:
            return Verdict.UNDECIDED, evidence.unfinished
        verdicts: dict[Part, Verdict]
        verdicts = {"paper": Verdict.HOLDS, "condition": Verdict.CONDITION}
        for part, verdict in verdicts.items():
            if evidence.passed(part):
                return verdict, ""
            if evidence.open(part):
                return Verdict.UNDECIDED, evidence.open(part)
        return Verdict.FAILS, ""


@dataclass(frozen=True)
class ClaimOutcome:
    """The result of one claim.

    Attributes:
        claim: the claim.
        verdict: the verdict of its checks; None if the test raised an exception.
        changed: whether the verdict is not the expected one, or a check of ours failed.
        evidence: the evidence.
        reason: why the checks do not decide, if they do not.
        seconds: duration of the test.
        fast: the mode.
        seed: the seed.
        error: the exception, if there was one.
    """

    claim: Claim
    verdict: Verdict | None
    changed: bool
    evidence: Evidence = Evidence(())
    reason: str = ""
    seconds: float = 0.0
    fast: bool = False
    seed: int = 0
    error: str = ""

    @classmethod
    def of(cls, claim: Claim, evidence: Evidence, run: ClaimRun, seconds: float) -> "ClaimOutcome":
        """Judge the evidence."""
        require(bool(evidence.checks), f"{claim.id}: a test without a check cannot fail")
        verdict, reason = claim.judge(evidence)
        silent: tuple[Part, ...] = ("corrected", *_silent_parts(verdict))
        failed = any(evidence.passed(part) is False for part in silent)
        changed = verdict != claim.expected or failed
        return cls(claim, verdict, changed, evidence, reason, seconds, run.fast, run.seed)


def _silent_parts(verdict: Verdict) -> tuple[Part, ...]:
    """Return the parts that do not decide the verdict and must not fail."""
    if verdict is Verdict.UNTESTABLE:
        return ("paper", "condition")
    return ("condition",) if verdict is Verdict.HOLDS else ()


Numbers = Sequence[Real] | Tensor


def chart(
    x: str, y: str, *series: FigureSeries, log: Literal["", "x", "y", "xy"] = ""
) -> FigureData:
    """Make a chart of series over two titled axes; `log` names the logarithmic ones."""
    x_scale, y_scale = ("log" if axis in log else "linear" for axis in "xy")
    return FigureData(FigureAxis(x, x_scale), FigureAxis(y, y_scale), series)


def line(name: str, x: Numbers, y: Numbers, *, dashed: bool = False) -> FigureSeries:
    """Make a line; the paper's own values are dashed by convention."""
    return FigureSeries(name, _numbers(x), _numbers(y), "dashed" if dashed else "line")


def dots(name: str, x: Numbers, y: Numbers, errors: Numbers | None = None) -> FigureSeries:
    """Make points, with their standard errors if given."""
    bars = None if errors is None else _numbers(errors)
    return FigureSeries(name, _numbers(x), _numbers(y), "dots", bars)


def _numbers(values: Numbers) -> tuple[float, ...]:
    return tuple(
        values.tolist() if isinstance(values, Tensor) else [float(value) for value in values]
    )
