"""Figures 4 and 5 judge the course of a run: planted ones change the verdict."""

import pytest
import torch

from tests.lab.claims.claim.test_claims_can_fail import scaled
from tieline.core.errors import TielineError
from tieline.lab.claims import gate_comparisons
from tieline.lab.claims.claim import ClaimRun, all_claims
from tieline.lab.claims.ledger import run_claim
from tieline.lab.claims.paper1 import smoothing as courses
from tieline.lab.claims.paper1.smoothing import RoutingCourse
from tieline.routing import losses as collect

STEPS = torch.arange(10, 330, 10)


def annealed(step):
    """The budget of the schedule."""
    return 2.5 - 0.5 * min(1, max(0, step / 160 - 1) * 2)


def constant(step):
    """The budget of Figure 4."""
    return 2.5


def planted(experts, width, losses=(5.0, 2.5)):
    """A course whose K and ε are functions of the step, alike in two layers."""
    both = [[[f(step)] * 2 for step in STEPS.tolist()] for f in (experts, width)]
    k, epsilon = (torch.tensor(rows, dtype=torch.float64) for rows in both)
    return RoutingCourse(STEPS, k, epsilon, k.new_zeros(len(STEPS), 2, 0), losses, 2.5)


def rising(step):
    """K of a run that begins below its budget."""
    return 2.1 if step <= 10 else 2.5


RIGHT = {
    "p1-fig4": planted(rising, lambda step: 0.1),
    "p1-fig5": planted(annealed, lambda step: annealed(step) - 1.99),
}
WRONG = {
    "p1-fig4": {
        "K stays at 2": planted(lambda step: 2.0, lambda step: 0.1),
        "K leaves its budget": planted(lambda step: 2.5 if step < 240 else 2.7, lambda step: 0.1),
        "ε shrinks": planted(rising, lambda step: 0.04),
        "K was there at once": planted(constant, lambda step: 0.1),
        "fewer than k experts": planted(lambda s: 1.9 if s == 20 else rising(s), lambda step: 0.1),
        "nothing is learned": planted(rising, lambda step: 0.1, (5.0, 4.9)),
    },
    "p1-fig5": {
        "K stays at its budget": planted(constant, lambda step: annealed(step) - 1.99),
        "K is 2 at once": planted(lambda step: 2.0, lambda step: annealed(step) - 1.99),
        "K falls too early": planted(
            lambda step: annealed(step + 80), lambda step: annealed(step) - 1.99
        ),
        "ε stays": planted(annealed, lambda step: 0.1),
    },
}


def claim_outcome(monkeypatch, name, course):
    monkeypatch.setattr(courses, "smoothing_course", lambda run, gate: course)
    return run_claim(all_claims()[name], ClaimRun(True, 0))


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_course_has_the_verdict_of_the_ledger(name, monkeypatch):
    outcome = claim_outcome(monkeypatch, name, RIGHT[name])
    assert outcome.error == ""
    assert not outcome.changed, outcome.evidence.checks
    assert outcome.evidence.figure.series


@pytest.mark.parametrize(("name", "what"), [(n, what) for n in WRONG for what in WRONG[n]])
def test_a_planted_course_changes_the_verdict(name, what, monkeypatch):
    outcome = claim_outcome(monkeypatch, name, WRONG[name][what])
    assert outcome.error == ""
    assert outcome.changed


def test_the_run_is_that_of_the_recipe_and_longer_in_full_mode(monkeypatch, no_axis_checks):
    from tieline.lab.claims.paper1 import smoothing as module

    calls = []
    monkeypatch.setattr(module, "routing_course", lambda config, *how: calls.append((config, how)))
    courses.smoothing_course(ClaimRun(True, 3), "annealed")
    courses.smoothing_course(ClaimRun(False, 0), "smooth50")
    (fast, how), (full, _) = calls
    assert (fast.recipe, fast.seed, fast.model.layers) == ("demo-small-annealed", 3, 2)
    assert how == (fast.optim.steps // 32, 64, ())
    assert (full.recipe, full.model.layers) == ("demo-small-smooth50", 4)
    assert full.optim.steps == 3 * fast.optim.steps


def test_without_what_trains_the_claim_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gate_comparisons, "find_spec", lambda name: None)
    with pytest.raises(TielineError, match=r"needs transformers: pip install 'tieline\[train\]'"):
        courses.smoothing_course(ClaimRun(True, 0), "smooth50")


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_boundary_loss_of_the_wrong_sign_changes_the_verdict_of_a_real_run(
    name, monkeypatch, no_axis_checks
):
    monkeypatch.setattr(collect, "boundary_loss", scaled(-1)(collect.boundary_loss))
    outcome = run_claim(all_claims()[name], ClaimRun(True, 0))
    assert outcome.error == ""
    assert outcome.changed
