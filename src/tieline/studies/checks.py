"""Comparisons that give checks; one with a number that is no number never passes.

near        |measured - reference| <= tolerance
within      |measured - reference| <= 4 standard errors, and they are small enough to mean something
at_most     measured <= reference + tolerance
at_least    measured >= reference - tolerance
none_of     a count of violations that must be zero
"""

import math

from tieline.studies.claim import Check, Part, Real

__all__ = ["ERRORS", "at_least", "at_most", "near", "none_of", "within"]

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
