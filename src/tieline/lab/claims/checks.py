"""Comparisons of a test: each makes a `Check` of the paper's statement.

near            |measured - reference| <= tolerance
within          |measured - reference| <= 4 standard errors, if these are small enough to decide
sampled         the same for an `Estimate`
estimated       a 95 % interval lies inside a range; open if it reaches across an end
unmeasured      a value of the paper that nothing here was measured against: always open
at_most         measured <= reference + tolerance
at_least        measured >= reference - tolerance
none_of         a count of violations is zero
qualified       the checks of the statement under a condition that the paper does not state
corrected       the checks of what is true instead, or in addition

A comparison with NaN never passes.
"""

import math
from dataclasses import replace

from tieline.core.statistics import Estimate
from tieline.lab.claims.claim import Check, Real

__all__ = [
    "STANDARD_ERRORS",
    "at_least",
    "at_most",
    "corrected",
    "estimated",
    "near",
    "none_of",
    "qualified",
    "sampled",
    "unmeasured",
    "within",
]

STANDARD_ERRORS = 4.0
"""Standard errors that an estimate may be off; more happens once in 16,000 checks."""


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


def unmeasured(name: str, reference: Real, reason: str) -> Check:
    """State a value of the paper against which nothing was measured, and why: always open."""
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
    """Make the checks part of the statement under a condition that the paper does not state."""
    return [replace(check, part="condition") for check in checks]


def corrected(*checks: Check) -> list[Check]:
    """Make the checks part of what is true instead of the statement, or in addition."""
    return [replace(check, part="corrected") for check in checks]
