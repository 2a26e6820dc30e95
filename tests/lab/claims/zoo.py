"""Claims with a known verdict."""

from dataclasses import replace

from tieline.lab.claims.claim import Claim, Evidence, Verdict, near, unmeasured


def evidence(**parts):
    """Evidence whose checks pass, fail or are open as told: paper=[True, False, None], ..."""
    checks = [
        unmeasured(f"{part} {place}", 0.0, "not run", part=part)
        if passed is None
        else near(f"{part} {place}", 0.0 if passed else 1.0, 0.0, part=part)
        for part, results in parts.items()
        for place, passed in enumerate(results)
    ]
    return Evidence(checks, paper=1.5, measured=float("inf"))


def make_claim(name="p0-test", expected=Verdict.HOLDS, **fields):
    claim = Claim(
        name, 0, "Thm 1", "a title", "a statement", "a setting", "a test",
        "a counterexample", expected,
        test=lambda run: evidence(paper=[True]),
    )  # fmt: skip
    return replace(claim, **fields)
