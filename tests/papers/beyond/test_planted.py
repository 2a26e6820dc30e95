"""A wrong value planted in what a claim beyond the papers rests on changes its verdict."""

import pytest
import torch

from tests.papers.registry.test_claims_can_fail import assert_planted_value_matters, scaled
from tieline.papers.registry import all_claims


def wider(real):
    """The projection of scores that are half as far apart."""
    return lambda scores, k, epsilon: real(scores, k, 0.9 * epsilon)


def steeper(real):
    """A Laplace ramp of another shape."""

    def call():
        places, shares = real()
        return places, torch.where(shares < 0.5, shares**2, 1 - (1 - shares) ** 2)

    return call


PLANTED = {
    "p5-law": ("continuity.laplace_ramp", steeper),
    "p5-frontier": ("continuity.least_moved", scaled(1.2)),
    "p5-gates": ("continuity.continuity_bound", scaled(1.2)),
    "p5-lipschitz": ("continuity.project", wider),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_value_changes_the_verdict(name, monkeypatch):
    assert_planted_value_matters(name, "beyond", PLANTED, monkeypatch)


def test_every_claim_beyond_the_papers_has_one():
    assert {name for name in all_claims() if name.startswith("p5-")} == set(PLANTED)
