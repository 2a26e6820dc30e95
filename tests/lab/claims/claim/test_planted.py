"""Every claim that is tested has a planted error."""

from importlib import import_module

from tests.lab.claims.claim.test_rate_claims import CLAIMS as RATES
from tieline.lab.claims.claim import PAPERS, all_claims

ELSEWHERE = {*RATES, "p5-heads"}
"""Claims whose planted errors are slopes, and students, of other tests."""


def test_every_claim_that_is_tested_has_a_planted_error():
    planted = set(ELSEWHERE)
    for paper in PAPERS.values():
        planted |= set(import_module(f"tests.lab.claims.{paper.package}.test_planted").PLANTED)
    tested = {name for name, claim in all_claims().items() if not claim.untestable}
    assert not tested - planted
    assert not planted - set(all_claims())
