"""How checks become a verdict, and records JSON."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.claims.zoo import evidence, make_claim
from tieline.core.errors import TielineError
from tieline.core.records import from_plain, to_plain
from tieline.lab.claims.claim import Claim, ClaimOutcome, ClaimRun, Verdict
from tieline.lab.claims.evidence import Evidence, FigureData, Fits, chart, dots, line

RESULTS = st.lists(st.sampled_from([True, False, None]), max_size=3)


@given(RESULTS, RESULTS, RESULTS)
def test_the_verdict_is_that_of_the_first_part_that_passes(paper, condition, corrected):
    verdict, reason = make_claim().judge(
        evidence(paper=paper, condition=condition, corrected=corrected)
    )
    assert bool(reason) is (verdict is Verdict.UNDECIDED)
    if paper and all(paper):
        assert verdict is Verdict.HOLDS
    elif None in paper and False not in paper:
        assert verdict is Verdict.UNDECIDED
    elif condition and all(condition):
        assert verdict is Verdict.CONDITION
    elif None in condition and False not in condition:
        assert verdict is Verdict.UNDECIDED
    else:
        assert verdict is Verdict.FAILS


@pytest.mark.parametrize(("converged", "decides"), [(17, False), (18, True), (20, True)])
@pytest.mark.parametrize("paper", [[True], [False]])
def test_no_verdict_rests_on_fits_that_did_not_converge(converged, decides, paper):
    claim_evidence = replace(evidence(paper=paper), fits=Fits(converged, 20))
    outcome = ClaimOutcome.of(make_claim(), claim_evidence, ClaimRun(), 0.1)
    assert (outcome.verdict is not Verdict.UNDECIDED) is decides
    assert decides or outcome.reason == "only 17 of 20 fits converged"


@pytest.mark.parametrize(
    ("expected", "checks", "changed"),
    [
        (Verdict.HOLDS, {"paper": [True]}, False),
        (Verdict.HOLDS, {"paper": [False]}, True),
        (Verdict.HOLDS, {"paper": [True], "corrected": [False]}, True),
        (Verdict.HOLDS, {"paper": [True], "condition": [False]}, True),
        (Verdict.CONDITION, {"paper": [False], "condition": [True]}, False),
        (Verdict.CONDITION, {"paper": [True], "condition": [True]}, True),
        (Verdict.CONDITION, {"paper": [False], "condition": [False]}, True),
        (Verdict.FAILS, {"paper": [True, False], "corrected": [True]}, False),
        (Verdict.FAILS, {"paper": [True], "corrected": [True]}, True),
        (Verdict.FAILS, {"paper": [False], "corrected": [False]}, True),
        (Verdict.UNDECIDED, {"paper": [None, True]}, False),
        (Verdict.UNDECIDED, {"paper": [None], "corrected": [False]}, True),
        (Verdict.UNDECIDED, {"paper": [True]}, True),
        (Verdict.HOLDS, {"paper": [None]}, True),
        (Verdict.HOLDS, {"paper": [True], "corrected": [None]}, True),
    ],
)
def test_a_change_is_another_verdict_or_a_check_of_ours_that_fails(expected, checks, changed):
    claim = make_claim(expected=expected)
    assert ClaimOutcome.of(claim, evidence(**checks), ClaimRun(), 0.1).changed is changed


@pytest.mark.parametrize("passed", [True, False])
def test_what_cannot_be_tested_here_still_has_checks_that_can_fail(passed):
    claim = make_claim(expected=Verdict.UNTESTABLE, untestable="needs a cluster")
    outcome = ClaimOutcome.of(claim, evidence(paper=[passed]), ClaimRun(), 0.1)
    assert outcome.verdict is Verdict.UNTESTABLE
    assert outcome.changed is not passed


def test_a_test_without_a_check_is_refused():
    with pytest.raises(TielineError, match="cannot fail"):
        ClaimOutcome.of(make_claim(), Evidence([]), ClaimRun(), 0.1)


def test_an_outcome_survives_json():
    outcome = ClaimOutcome.of(make_claim(), evidence(paper=[True]), ClaimRun(True, 3), 0.5)
    plain = to_plain(outcome, nonfinite_as_text=True)
    again = from_plain(ClaimOutcome, json.loads(json.dumps(plain, allow_nan=False)))
    assert to_plain(again, nonfinite_as_text=True) == plain
    assert again.verdict is Verdict.HOLDS
    assert (again.fast, again.seed, plain["evidence"]["measured"]) == (True, 3, "inf")


def test_a_claim_from_a_file_says_that_it_has_no_test():
    with pytest.raises(NotImplementedError, match="no test"):
        from_plain(Claim, to_plain(make_claim())).test(ClaimRun())


def test_a_chart_survives_json():
    points = dots("found", torch.tensor([1.0, math.nan]), [math.inf, 2], [0.1, 0.2])
    drawn = chart("x", "y", line("bound", [0, 1], [1, 2], dashed=True), points, log="x")
    plain = to_plain(drawn, nonfinite_as_text=True)
    assert plain["series"][1]["x"] == [1.0, "nan"]
    assert to_plain(from_plain(FigureData, plain), nonfinite_as_text=True) == plain


def test_draws_depend_on_seed_and_stream_alone():
    assert torch.equal(
        ClaimRun(True, 1).normal(4, stream=2), ClaimRun(False, 1).normal(4, stream=2)
    )
    others = [ClaimRun(seed=2).normal(4, stream=2), ClaimRun(seed=1).normal(4, stream=3)]
    assert all(not torch.equal(ClaimRun(seed=1).normal(4, stream=2), other) for other in others)
    assert (ClaimRun(True).size(1, 9), ClaimRun(False).size(1, 9)) == (1, 9)
