"""A wrong value planted in what a claim rests on changes its verdict, in every family of claims."""

from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest
import torch

from tieline.papers.claim import Run
from tieline.papers.registry import all_claims
from tieline.papers.runner import run_claim
from tieline.routing import TopK

RUN = Run(True, 0)


def at(place):
    """The owner and the name of `paper0.model.pair_gap`, `problems.GraphRouter.mass`."""
    *names, last = place.split(".")
    owner = import_module("tieline.papers")
    for name in names:
        inner = f"{owner.__name__}.{name}"
        is_module = isinstance(owner, ModuleType) and hasattr(owner, "__path__")
        owner = import_module(inner) if is_module else getattr(owner, name)
    return owner, last


def scaled(factor):
    """A function whose result is wrong by a factor."""
    return lambda real: lambda *args, **kwargs: factor * real(*args, **kwargs)


def with_argument(place, factor):
    """A function that takes one of its arguments for another."""

    def wrong(real):
        def call(*args, **kwargs):
            if isinstance(place, str):
                kwargs[place] = kwargs[place] * factor
            else:
                args = tuple(a * factor if i == place else a for i, a in enumerate(args))
            return real(*args, **kwargs)

        return call

    return wrong


def with_field(**changes):
    """A function whose record has wrong fields, each by a function of the record."""

    def wrong(real):
        def call(*args, **kwargs):
            found = real(*args, **kwargs)
            return replace(found, **{name: change(found) for name, change in changes.items()})

        return call

    return wrong


PLANTED = {
    # paper 0
    "p0-sec2-gauge": ("paper0.model.soft_predictions", lambda real: lambda s, tau: s.scores[:, 0]),
    "p0-def3.1": ("paper0.model.boundary_mass_pair", with_argument(1, 1.1)),
    "p0-rem5.4": ("paper0.model.ambiguity_mass", with_argument(2, 5.0)),
    "p0-lem3.6": ("problems.GraphRouter.mass", scaled(1.01)),
    "p0-ex3.8": ("paper0.coarea.gaussian_boundary_mass", with_argument(1, 1.1)),
    "p0-lem4.1": ("paper0.limit.top_gap", scaled(1.1)),
    "p0-thm4.5": ("paper0.limit.gaussian_slope", with_field(value=lambda f: -f.value)),
    "p0-lem5.5": ("paper0.landscape.risk_decomposition", with_field(interior=lambda f: f.total)),
    "p0-prop5.8": ("paper0.landscape.cell_control", lambda real: lambda *args: tuple(
        replace(cell, slack=cell.slack.times(-1.0)) for cell in real(*args)
    )),
    "p0-asm5.12": ("paper0.assumptions.torch.linalg.svdvals", lambda real: lambda x: real(x[:2])),
    "p0-lem5.15": ("paper0.assumptions.perturbed_curvature", with_field(least=lambda f: 9.0)),
    "p0-lem5.16": ("paper0.landscape.misrouting_bound", with_field(paper_bound=lambda f: 0.0)),
    "p0-lem6.2": ("paper0.breaking.response_constant", scaled(1.001)),
    "p0-eq6.7": ("paper0.breaking.relabelled", lambda real: lambda v, d: (-v, d)),
    "p0-eq6.10": ("paper0.breaking.alignment_rate", with_field(ratio=lambda f: f.ratio**1.1)),
    # paper 1
    "p1-def3.1": ("paper1.ties.stable_topk", lambda real: lambda scores, k: scores.flip(1).topk(k)),
    "p1-def3.2": ("paper1.ties.tie_order", scaled(2)),
    "p1-eqA.7": ("paper1.ties.kth_largest", lambda real: lambda s, k: -real(-s, k)),
    "p1-propA.9": ("paper1.tubes.tube_fraction", scaled(1.0001)),
    "p1-propA.11": ("paper1.tubes._printed_beta", lambda real: lambda dim, offset, *rest: (
        real(dim, abs(offset), *rest)
    )),
    "p1-lemA.17": ("paper1.ties.router", lambda real: lambda *args: (
        torch.ones(5, 7, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    )),
    "p1-thm4.4-alpha": ("paper1.ties.slice_density", lambda real: lambda *a: min(0.5, real(*a))),
    "p1-propA.20": ("paper1.tubes.linf_distance", scaled(2)),
    "p1-propA.21": ("paper1.diffusion.face_exit", scaled(0.9)),
    "p1-lemA.25": ("paper1.diffusion.topk_mask", lambda real: lambda s, k: torch.ones_like(s) > 0),
    "p1-propA.31": ("paper1.diffusion.flat_occupation", with_argument("epsilon", 0.8)),
    "p1-sec6-smoothstep": ("paper1.smoothing.smoothstep", with_argument(2, 0.98)),
    "p1-sec6-gate": ("paper1.smoothing.SmoothTopK", with_argument("epsilon", 1.1)),
    "p1-sec6-loss": ("paper1.smoothing.boundary_loss", scaled(-1)),
    "p1-secB.2": ("paper1.experiments.SmoothTopK", lambda real: lambda k, epsilon: TopK(k)),
    "p1-table1": ("paper1.tables.gain_in_errors", scaled(0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_value_changes_the_verdict(name, monkeypatch):
    claim = all_claims()[name]
    honest = run_claim(claim, RUN)
    assert not honest.changed, (honest.error, honest.evidence)
    place, wrong = PLANTED[name]
    owner, attribute = at(place)
    monkeypatch.setattr(owner, attribute, wrong(getattr(owner, attribute)))
    spoiled = run_claim(claim, RUN)
    assert spoiled.changed
    assert not spoiled.error, spoiled.error


@pytest.mark.slow
@pytest.mark.parametrize("name", all_claims())
def test_every_claim_has_the_verdict_of_the_ledger(name, no_axis_checks):
    outcome = run_claim(all_claims()[name], RUN)
    assert not outcome.error
    assert not outcome.changed, outcome.evidence.checks


def assert_planted_value_matters(name, paper, planted, monkeypatch):
    """The verdict of a claim is the expected one, and another with a wrong value in its place."""
    claim = all_claims()[name]
    honest = run_claim(claim, RUN)
    assert not honest.changed, (honest.error, honest.evidence)
    place, wrong = planted[name]
    owner, attribute = at(f"{paper}.{place}")
    monkeypatch.setattr(owner, attribute, wrong(getattr(owner, attribute)))
    spoiled = run_claim(claim, RUN)
    assert spoiled.changed
    assert not spoiled.error, spoiled.error
