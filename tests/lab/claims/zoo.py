"""Claims with a known verdict."""

from dataclasses import replace

from tieline.lab.claims.claim import Claim, Verdict
from tieline.lab.claims.evidence import Evidence, near, unmeasured


def evidence(**results_by_part):
    """Evidence whose checks pass, fail or are open: paper=[True, False, None], ..."""
    checks = [
        replace(_check(f"{part} {index}", passed), part=part)
        for part, results in results_by_part.items()
        for index, passed in enumerate(results)
    ]
    return Evidence(checks, paper=1.5, measured=float("inf"))


def _check(name, passed):
    if passed is None:
        return unmeasured(name, 0.0, "not run")
    return near(name, 0.0 if passed else 1.0, 0.0)


def make_claim(name="p0-test", expected=Verdict.HOLDS, **fields):
    claim = Claim(
        name, 0, "Thm 1", "a title", "a statement", "a setting", "a test",
        "a counterexample", expected,
        test=lambda run: evidence(paper=[True]),
    )  # fmt: skip
    return replace(claim, **fields)
