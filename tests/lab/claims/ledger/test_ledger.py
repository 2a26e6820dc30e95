"""The record of all outcomes: counts, changed verdicts, and a round trip through a file."""

from tests.lab.claims.zoo import evidence, make_claim
from tieline.core.records import read_result
from tieline.lab.claims import Catalogue, ClaimOutcome, ClaimRun, Ledger, Verdict

RUN = ClaimRun(True, 3)


def test_the_ledger_counts_verdicts_and_names_what_changed(tmp_path):
    outcomes = [
        ClaimOutcome.of(make_claim("p0-a"), evidence(paper=[True]), RUN, 0.1),
        ClaimOutcome.of(make_claim("p1-b"), evidence(paper=[False]), RUN, 0.1),
        ClaimOutcome(make_claim("p1-c"), None, True, error="ValueError: no"),
    ]
    ledger = Ledger.of(outcomes, RUN)
    assert ledger.verdicts == {
        Verdict.HOLDS: 1, Verdict.CONDITION: 0, Verdict.FAILS: 1,
        Verdict.UNDECIDED: 0, Verdict.UNTESTABLE: 0
    }  # fmt: skip
    assert ledger.changed == ("p1-b", "p1-c")
    assert ledger.broken == ("p1-c",)
    assert (ledger.provenance.mode, ledger.provenance.seed) == ("fast", 3)
    ledger.to_json(tmp_path / "ledger.json")
    again = read_result(tmp_path / "ledger.json")
    assert isinstance(again, Ledger)
    assert again.to_dict() == ledger.to_dict()
    assert ledger.to_dict()["claims"][0]["evidence"]["measured"] == "inf"


def test_the_catalogue_names_the_papers_of_its_claims(tmp_path):
    listed = Catalogue.of([make_claim("p0-a")])
    assert [paper.name for paper in listed.papers] == ["boundary-mass"]
    values = listed.to_dict()
    assert values["format"] == "tieline-claims"
    assert list(values["claims"][0]) == [
        "id", "paper", "number", "title", "statement", "setting", "tested", "overturned_by",
        "expected", "condition", "untestable", "undecided",
    ]  # fmt: skip
