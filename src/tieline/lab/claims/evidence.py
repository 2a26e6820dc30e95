"""The evidence of a claim's test: comparisons of numbers (checks), and the data of a figure.

near            |measured - reference| <= tolerance
within          |measured - reference| <= 4 standard errors, if these are small enough to decide
sampled         the same for an `Estimate`
estimated       a 95 % interval lies inside a range; open if it reaches across an end
unmeasured      a value of the paper without a measurement here: always open
at_most         measured <= reference + tolerance
at_least        measured >= reference - tolerance
none_of         a count of violations is zero
qualified       the checks of the statement under a condition that the paper does not state
corrected       the checks of what is true instead, or in addition

A comparison with NaN never passes. `chart`, `line` and `dots` make the data of a claim's figure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from torch import Tensor

from tieline.core.statistics import Estimate

__all__ = [
    "STANDARD_ERRORS",
    "Check",
    "Evidence",
    "FigureAxis",
    "FigureData",
    "FigureSeries",
    "Fits",
    "Part",
    "Real",
    "Value",
    "at_least",
    "at_most",
    "chart",
    "corrected",
    "dots",
    "estimated",
    "line",
    "near",
    "none_of",
    "qualified",
    "sampled",
    "standard_errors_off",
    "unmeasured",
    "within",
]

Part = Literal["paper", "condition", "corrected"]
Real = float | int
Value = Real | str | None


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
        """Collect checks and lists of checks, such as those of `corrected`."""
        nested = ([check] if isinstance(check, Check) else check for check in checks)
        return cls(tuple(chain.from_iterable(nested)), **fields)

    def passed(self, part: Part) -> bool | None:
        """Return whether all checks of a part passed, None if there are none."""
        results = [check.passed for check in self.checks if check.part == part]
        return all(results) if results else None

    def open(self, part: Part) -> str:
        """Reason why a part is open; empty if it passes, fails or has no checks."""
        failed = [check for check in self.checks if check.part == part and not check.passed]
        reasons = dict.fromkeys(f"{check.name}: {check.open}" for check in failed)
        return "; ".join(reasons) if all(check.open for check in failed) else ""

    @property
    def unfinished(self) -> str:
        """Reason why the fits do not decide; empty if enough of them converged."""
        return "" if self.fits is None or self.fits.enough else f"only {self.fits}"


STANDARD_ERRORS = 4.0
"""Standard errors by which an estimate may deviate; more happens once in 16,000 checks."""


def near(name: str, measured: Real, reference: Real, tolerance: Real = 1e-9) -> Check:
    """Compare two numbers to an absolute tolerance."""
    measured, reference = float(measured), float(reference)
    passed = measured == reference or abs(measured - reference) <= tolerance
    return Check(name, measured, "=", reference, float(tolerance), passed)


def within(
    name: str,
    measured: Real,
    stderr: Real,
    reference: Real,
    *,
    resolution: Real = 0.05,
    bias: Real = 0.0,
) -> Check:
    """Compare an estimate with a reference to four standard errors.

    Args:
        name: what is compared.
        measured: the estimate.
        stderr: its standard error.
        reference: the expected value.
        resolution: largest ratio of standard error to reference; a less precise estimate is open.
        bias: known bias of the estimate or of the reference, added to the tolerance.
    """
    measured, reference = float(measured), float(reference)
    tolerance = float(STANDARD_ERRORS * stderr + bias)
    sharp = math.isfinite(stderr) and stderr <= resolution * max(abs(reference), abs(measured))
    passed = sharp and abs(measured - reference) <= tolerance
    vague = "" if sharp else f"the standard error of {float(stderr):.2g} is too large"
    return Check(name, measured, "=", reference, tolerance, passed, open=vague)


def sampled(name: str, estimate: Estimate, reference: Real, **options: Real) -> Check:
    """Compare an `Estimate` with a reference as `within` does; open if it has no value or error."""
    value = math.nan if estimate.value is None else estimate.value
    error = math.nan if estimate.standard_error is None else estimate.standard_error
    return within(name, value, error, reference, **options)


def estimated(
    name: str,
    measured: Real,
    interval: tuple[Real, Real],
    *,
    least: Real = -math.inf,
    most: Real = math.inf,
) -> Check:
    """Check that an estimate lies in a range, by its 95 % interval.

    Passes if the interval lies in [least, most], fails if it lies outside, and is open if it
    reaches across an end.
    """
    low, high = float(interval[0]), float(interval[1])
    inside, outside = least <= low and high <= most, high < least or low > most
    across = "" if inside or outside else f"the interval {low:.2f} to {high:.2f} reaches across"
    rule, reference, tolerance = "=", (least + most) / 2, (most - least) / 2
    if not math.isfinite(tolerance):
        rule, reference, tolerance = (">=", least, 0.0) if most == math.inf else ("<=", most, 0.0)
    limits = rule, float(reference), float(tolerance)
    return Check(name, float(measured), *limits, inside, open=across, low=low, high=high)


def standard_errors_off(samples: Tensor, expected: Tensor) -> float:
    """Largest deviation of means over the first axis from expected values, in standard errors."""
    error = samples.std(dim=0) / len(samples) ** 0.5
    return ((samples.mean(dim=0) - expected) / error).abs().max().item()


def unmeasured(name: str, reference: Real, reason: str) -> Check:
    """State a value of the paper that was not measured here, and why; always open."""
    return Check(name, math.nan, "=", float(reference), 0.0, False, open=reason)


def at_most(name: str, measured: Real, reference: Real, tolerance: Real = 0.0) -> Check:
    """Check an upper bound."""
    passed = float(measured) <= float(reference) + tolerance
    return Check(name, float(measured), "<=", float(reference), float(tolerance), passed)


def at_least(name: str, measured: Real, reference: Real, tolerance: Real = 0.0) -> Check:
    """Check a lower bound."""
    passed = float(measured) >= float(reference) - tolerance
    return Check(name, float(measured), ">=", float(reference), float(tolerance), passed)


def none_of(name: str, violations: Real) -> Check:
    """Check that nothing violates a rule."""
    return near(name, float(violations), 0.0, 0.0)


def qualified(*checks: Check) -> list[Check]:
    """Assign checks to the statement under a condition that the paper does not state."""
    return [replace(check, part="condition") for check in checks]


def corrected(*checks: Check) -> list[Check]:
    """Assign checks to the correction of the statement, or to an addition."""
    return [replace(check, part="corrected") for check in checks]


Numbers = Sequence[Real] | Tensor


def chart(
    x: str, y: str, *series: FigureSeries, log: Literal["", "x", "y", "xy"] = ""
) -> FigureData:
    """Make a chart of series over two titled axes; `log` names the logarithmic ones."""
    x_scale, y_scale = ("log" if axis in log else "linear" for axis in "xy")
    return FigureData(FigureAxis(x, x_scale), FigureAxis(y, y_scale), series)


def line(name: str, x: Numbers, y: Numbers, *, dashed: bool = False) -> FigureSeries:
    """Make a line; the paper's own values are dashed by convention."""
    return FigureSeries(name, _series_values(x), _series_values(y), "dashed" if dashed else "line")


def dots(name: str, x: Numbers, y: Numbers, errors: Numbers | None = None) -> FigureSeries:
    """Make points, with their standard errors if given."""
    bars = None if errors is None else _series_values(errors)
    return FigureSeries(name, _series_values(x), _series_values(y), "dots", bars)


def _series_values(values: Numbers) -> tuple[float, ...]:
    """Numbers of a series as a tuple of floats."""
    return tuple(
        values.tolist() if isinstance(values, Tensor) else [float(value) for value in values]
    )
