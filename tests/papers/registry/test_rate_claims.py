"""Rate claims judge slopes: right ones keep the verdict, planted ones change it."""

import itertools
import re

import pytest
import torch

from tieline.estimation.model import MoEModel
from tieline.estimation.rate_plan import RatePlan
from tieline.estimation.rates import RateRow, RateStudy
from tieline.estimation.solvers import Status
from tieline.papers.claim import Run
from tieline.papers.paper2 import theorems as paper2
from tieline.papers.paper4 import theorems as paper4
from tieline.papers.registry import all_claims
from tieline.papers.runner import run_claim

RUN = Run(True, 0)
MODEL = MoEModel("linear", "softmax", "tanh", d=1, n_experts=2)
LAWS = {"raw": -0.05, "quotient": -0.5, "function": -0.5}
"""What is measured: raw losses keep the start, the others fall."""
BOUNDS = re.compile("p2-thm[2456]|p4-thm[1-5]")
"""The other claims of the same files: bounds of a loss by the distance of the functions."""
EVERY = [
    name
    for name, one in all_claims().items()
    if one.test.__module__.endswith(".theorems") and not BOUNDS.fullmatch(name)
]
CLAIMS = [name for name in EVERY if name != "p2-sec4"]


def planted(run, model, *, laws=LAWS, shrink=False, radii=(0.1,), **options):
    """A study whose losses follow exact power laws; a start that shrinks moves the raw one."""
    if shrink:
        laws = {**laws, "raw": -0.5}
    truth = MODEL.unflatten(torch.zeros(8, dtype=torch.float64))
    plan = RatePlan("planted", MODEL, MODEL, truth, truth, radii=radii, sizes=(500, 4000))
    places = itertools.product(radii, plan.sizes, range(4))
    return RateStudy.of(plan, [row(laws, radius, radii[-1], n, r) for radius, n, r in places])


def row(laws, radius, last, n, repetition):
    """Losses by their laws; the raw one falls better from starts nearer than the last."""
    powers = {**laws, "raw": laws["raw"] - 0.2 * (radius != last)}
    losses = {name: (1 + 0.01 * repetition) * n**power for name, power in powers.items()}
    place = {"study": "planted", "n": n, "radius": radius, "repetition": repetition}
    ended = {"status": int(Status.CONVERGED), "iterations": 1, "loss": 0.0}
    return RateRow(**place, **ended, **losses, empty=0, seconds=0.0)


@pytest.fixture
def with_laws(monkeypatch):
    def plant(laws):
        def study(run, model, **options):
            return planted(run, model, laws=laws, **options)

        for module in (paper2, paper4):
            monkeypatch.setattr(module, "small_study", study)

    return plant


def test_there_are_rate_claims_of_both_papers():
    assert len(EVERY) == 26


@pytest.mark.parametrize("name", CLAIMS)
def test_the_measured_laws_give_the_verdict_of_the_ledger(with_laws, name):
    with_laws(LAWS)
    outcome = run_claim(all_claims()[name], RUN)
    assert outcome.error == ""
    assert not outcome.changed, outcome.evidence.checks


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize(
    "laws",
    [{"raw": -0.05, "quotient": -0.05, "function": -0.05}, dict.fromkeys(LAWS, 0.2)],
    ids=["slow", "growing"],
)
def test_losses_that_do_not_fall_change_every_verdict(with_laws, name, laws):
    with_laws(laws)
    assert run_claim(all_claims()[name], RUN).changed


@pytest.mark.parametrize("name", ["p2-thm6-rate", "p4-thm5-rate", "p2-sec4"])
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
