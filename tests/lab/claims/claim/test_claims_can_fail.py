"""Helpers for the planted errors of all papers, and the verdict of every claim without them.

A planted error names a function in the module of a claim and a mistake that could have been made in
it: a factor, a sign, an argument or a symmetry forgotten. The checks of the claim stay as they are.
"""

from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest

from tieline.lab.claims.claim import ClaimRun, all_claims
from tieline.lab.claims.ledger import run_claim

RUN = ClaimRun(True, 0)


def at(path):
    """The owner and the name of `paper0.boundary_mass.pair_gap`, `problems.GraphRouter.mass`."""
    *names, last = path.split(".")
    owner = import_module("tieline.lab.claims")
    for name in names:
        inner = f"{owner.__name__}.{name}"
        is_module = isinstance(owner, ModuleType) and hasattr(owner, "__path__")
        owner = import_module(inner) if is_module else getattr(owner, name)
    return owner, last


def scaled(factor):
    """A function whose result is wrong by a factor."""
    return lambda real: lambda *args, **kwargs: factor * real(*args, **kwargs)


def with_argument(argument, factor):
    """A function that scales one of its arguments by mistake."""

    def wrong(real):
        def call(*args, **kwargs):
            if isinstance(argument, str):
                kwargs[argument] = kwargs[argument] * factor
            else:
                args = tuple(a * factor if i == argument else a for i, a in enumerate(args))
            return real(*args, **kwargs)

        return call

    return wrong


def with_field(**changes):
    """A function whose record has wrong fields, each by a function of the record."""

    def wrong(real):
        def call(*args, **kwargs):
            record = real(*args, **kwargs)
            return replace(record, **{name: change(record) for name, change in changes.items()})

        return call

    return wrong


def decided(real):
    """A check that was called measured although it is open."""
    return lambda *args, **kwargs: replace(real(*args, **kwargs), open="")


COSTLY = 0.5
"""Seconds of a fast test from which its planted error is a slow test."""


def by_cost(planted):
    """The names of claims, the costly ones marked as slow."""
    claims = all_claims()
    return [
        pytest.param(name, marks=[pytest.mark.slow] if claims[name].seconds >= COSTLY else [])
        for name in planted
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", all_claims())
def test_every_claim_has_the_verdict_of_the_ledger(name, no_axis_checks):
    outcome = run_claim(all_claims()[name], RUN)
    assert not outcome.error
    assert not outcome.changed, outcome.evidence.checks


def assert_planted_value_matters(name, paper, planted, monkeypatch):
    """A wrong value changes the verdict of the claim, or fails a check of our own."""
    claim = all_claims()[name]
    honest = run_claim(claim, RUN)
    assert not honest.changed, (honest.error, honest.evidence)
    path, wrong = planted[name]
    owner, attribute = at(f"{paper}.{path}")
    monkeypatch.setattr(owner, attribute, wrong(getattr(owner, attribute)))
    spoiled = run_claim(claim, RUN)
    assert not spoiled.error, spoiled.error
    assert spoiled.changed, spoiled.evidence.checks
