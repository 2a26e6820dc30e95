"""The tests that `pytest --tieline-router` collects: one per case of the battery."""

from tieline.testing.conformance import Router, check_case
from tieline.testing.logit_battery import LogitCase
from tieline.testing.reference_rules import RouterRule


def test_router(tieline_case: tuple[Router, RouterRule, LogitCase]) -> None:
    """The router conforms on this case."""
    judged = check_case(*tieline_case)
    assert judged.verdict == "conforms", f"{judged.verdict}: {judged.reason}"
