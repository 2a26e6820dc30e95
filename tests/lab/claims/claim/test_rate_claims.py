"""Rate claims judge slopes: right ones keep the verdict, planted ones change it."""

import math
import re
from itertools import product

import pytest

from tieline.lab.claims.claim import ClaimRun, Verdict, all_claims
from tieline.lab.claims.ledger import run_claim
from tieline.lab.claims.paper2 import bounds_and_rates as paper2
from tieline.lab.claims.paper4 import bounds_and_rates as paper4
from tieline.lab.claims.rate_studies import small_plan
from tieline.lab.estimation.identifiability import cramer_rao
from tieline.lab.estimation.rates import RateRow, RateStudy
from tieline.lab.estimation.solvers import Status

RUN = ClaimRun(True, 0)
EXACT = {"raw": -0.05, "quotient": -0.5, "function": -0.5, "experts": -0.5}
OVER = EXACT | {"experts": -0.25}
"""What is measured: raw losses keep the start, the others fall."""
BOUNDS = re.compile("p2-thm[2456]|p4-thm[1-5]")
"""The other claims of the same files: bounds of a loss by the distance of the functions."""
EVERY = [
    name
    for name, claim in all_claims().items()
    if claim.test.__module__.endswith(".bounds_and_rates") and not BOUNDS.fullmatch(name)
]
CLAIMS = [name for name in EVERY if name != "p2-sec4"]


def right(model, extra, sparse):
    """The laws that were measured."""
    if extra and sparse and model.expert == "linear":
        return OVER | {"experts": 0.0}
    if extra and sparse and model.gate == "quadratic":
        return OVER | {"quotient": -0.25}
    return OVER if extra else EXACT


def same(laws):
    """The same laws for every study."""
    return lambda model, extra, sparse: laws


def planted(run, model, laws, status, *, extra=0, sparse=False, source=None, **grid):
    """A study whose losses follow exact power laws, at the Cramér-Rao limits where these are."""
    plan = small_plan(run, model, extra=extra, sparse=sparse, **grid)
    limits = cramer_rao(model, plan.truth)._asdict()
    powers = laws(model, extra, sparse)
    cells = product(plan.radii, plan.sizes, range(4))
    return RateStudy.from_rows(plan, [row(plan, powers, limits, status, *cell) for cell in cells])


def row(plan, powers, limits, status, radius, n, repetition):
    """Losses by their laws; the raw one falls better from starts nearer than the last."""
    powers = powers | {"raw": powers["raw"] - 0.2 * (radius != plan.radii[-1])}
    levels = {k: plan.noise * v**0.5 for k, v in limits.items() if math.isfinite(v)}
    losses = {
        name: levels.get(name, 1.0) * (1 + 0.01 * repetition) * n**power
        for name, power in powers.items()
    }
    cell = {"study": "planted", "n": n, "radius": radius, "repetition": repetition}
    ended = {"status": int(status), "iterations": 1, "loss": 0.0}
    return RateRow(**cell, **ended, **losses, empty=0, seconds=0.0)


@pytest.fixture
def with_laws(monkeypatch):
    def plant(laws, status=Status.CONVERGED):
        def study(run, model, **options):
            return planted(run, model, laws, status, **options)

        for module in (paper2, paper4):
            monkeypatch.setattr(module, "small_study", study)

    return plant


def test_there_are_rate_claims_of_both_papers():
    assert len(EVERY) == 22


@pytest.mark.parametrize("name", CLAIMS)
def test_the_measured_laws_give_the_verdict_of_the_ledger(with_laws, name):
    with_laws(right)
    outcome = run_claim(all_claims()[name], RUN)
    assert outcome.error == ""
    assert not outcome.changed, outcome.evidence.checks


# p2-fig1b rests on the weights of the paper's design alone: the test below plants its error
@pytest.mark.parametrize("name", [name for name in CLAIMS if name != "p2-fig1b"])
@pytest.mark.parametrize("power", [-0.05, 0.2], ids=["slow", "growing"])
def test_losses_that_do_not_fall_change_every_verdict(with_laws, name, power):
    with_laws(same(dict.fromkeys(EXACT, power)))
    assert run_claim(all_claims()[name], RUN).changed


@pytest.mark.parametrize("name", ["p2-fig1a", "p2-fig1b"])
def test_a_vanilla_arm_without_zero_rows_changes_the_verdict(with_laws, monkeypatch, name):
    with_laws(right)
    share = paper2.undefined_share
    monkeypatch.setattr(paper2, "undefined_share", lambda run: share(run, zero_rows=0))
    assert run_claim(all_claims()[name], RUN).changed


@pytest.mark.parametrize("name", CLAIMS)
def test_fits_that_did_not_converge_decide_nothing(with_laws, name):
    with_laws(right, Status.UNFINISHED)
    outcome = run_claim(all_claims()[name], RUN)
    assert outcome.verdict is Verdict.UNDECIDED
    assert "fits converged" in outcome.reason


@pytest.mark.parametrize("name", ["p2-thm6-rate", "p4-cor2", "p2-sec4"])
def test_a_claim_of_each_paper_by_real_fits(name):
    outcome = run_claim(all_claims()[name], RUN)
    assert outcome.error == ""
    assert not outcome.changed, outcome.evidence.checks


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_rate_claim_by_real_fits(name):
    outcome = run_claim(all_claims()[name], RUN)
    assert outcome.error == ""
    assert not outcome.changed, outcome.evidence.checks
