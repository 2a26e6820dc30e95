"""A wrong value planted in what a claim beyond the papers rests on changes its verdict."""

import numpy as np
import pytest
import torch

from tests.lab.claims.claim.test_claims_can_fail import (
    assert_planted_value_matters,
    by_cost,
    scaled,
    with_argument,
)
from tieline.lab.claims.claim import all_claims
from tieline.lab.estimation import MoEParameters


def wider(real):
    """The projection of scores that are half as far apart."""
    return lambda scores, k, epsilon: real(scores, k, 0.9 * epsilon)


def steeper(real):
    """A Laplace ramp of another shape."""

    def call():
        positions, shares = real()
        return positions, torch.where(shares < 0.5, shares**2, 1 - (1 - shares) ** 2)

    return call


def masses_kept(real):
    """Doubled atoms that keep their whole mass beside one that was not doubled."""

    def call(*args, **kwargs):
        doubled = real(*args, **kwargs)
        return MoEParameters(
            doubled.router, doubled.bias + 0.1 * torch.arange(len(doubled.bias)), doubled.experts
        )

    return call


PLANTED = {
    # Δ/2τ in place of Δ/τ
    "p5-hardening": (
        "continuous_gates.distance_to_top_k_weights",
        lambda real: lambda s, k, tau: real(s, k, 3 * tau),
    ),
    # E[J² σ²] in place of E[J²] E[J² σ²]
    "p5-token-noise": (
        "continuous_gates.token_noise_bounds",
        lambda real: lambda f, j, s: real(f, j, 1.1 * s),
    ),
    # a projection that goes too far
    "p5-off-segment": (
        "continuous_gates.segment_share",
        lambda real: lambda y, low, high: (1.5 * real(y, low, high)[0], real(y, low, high)[1]),
    ),
    # F without 1 - F
    "p5-nearest": ("flips.least_distance_share", scaled(1.1)),
    # noise that leaves the margin of run A
    "p5-flips": (
        "flips.flipped_margins",
        lambda real: lambda run, noise, grid=0.0: real(run, noise, grid or 0.02),
    ),
    # the rounding of stored scores forgotten
    "p5-certificate": (
        "flips.certified_choices",
        lambda real: lambda *args, **options: real(*args, **options | {"output_unit": 0.0}),
    ),
    # a correction of A forgotten: a larger gap of lower order at small radii
    "p5-lojasiewicz": (
        "flips.two_atom_gap",
        lambda real: lambda point, masses: np.exp(-1 / np.abs(point[0])) ** 4 * np.ones(3),
    ),
    # vertices of a polyhedron of one dimension less
    "p5-levels": (
        "router_laws.most_vertices",
        lambda real: lambda facets, dim: real(facets, dim - 1),
    ),
    "p5-doubling": ("estimation_laws.doubled_atoms", masses_kept),
    # the sign of the expert forgotten
    "p5-reflection": (
        "estimation_laws.reflected_atoms",
        lambda real: (
            lambda truth, spare: MoEParameters(
                real(truth, spare).router, real(truth, spare).bias, real(truth, spare).experts.abs()
            )
        ),
    ),
    # A without its correction
    "p5-contact": (
        "estimation_laws.sigmoid_sum_remainder",
        lambda real: lambda masses, b, a, size: real(masses, b, 0 * a, size),
    ),
    # a coefficient lost from the fourth-order term
    "p5-corrected-bound": (
        "estimation_laws.fourth_term",
        lambda real: lambda p, r: real(p, r) + 0.05 * (p * r) ** 2,
    ),
    # walls whose deviation forgot a factor
    "p5-structured": (
        "router_laws.whitened_router",
        lambda real: lambda weight, law: 3 * real(weight, law),
    ),
    "p5-real-noise": ("router_laws.perturbation_law", lambda real: lambda steps: real(3 * steps)),
    "p5-law": ("continuous_gates.laplace_ramp", steeper),
    "p5-frontier": ("continuous_gates.least_moved", scaled(1.2)),
    "p5-gates": ("continuous_gates.continuity_bound", scaled(1.2)),
    "p5-lipschitz": ("continuous_gates.seat_projection", wider),
    "p5-sphere": ("router_laws.router_sphere_centre", scaled(1.1)),
    # half of what is added to the norm of a token
    "p5-zero": (
        "router_laws.cosine_router",
        lambda real: lambda run, tau: real(run, (tau[0], tau[1] / 2)),
    ),
    # the second and third moments of the other form
    "p5-soft-slope": (
        "router_laws.ramp_moments",
        lambda real: (
            lambda form: (
                real(form)[0],
                *real({"softmax": "projection", "projection": "softmax"}[form])[1:],
            )
        ),
    ),
    # the density of the gap taken for that of the signed margin
    "p5-layers": ("continuous_gates.projected_cost", with_argument(0, 2.0)),
}


@pytest.mark.parametrize("name", by_cost(PLANTED))
def test_a_planted_value_changes_the_verdict(name, monkeypatch):
    assert_planted_value_matters(name, "beyond", PLANTED, monkeypatch)


def test_every_claim_beyond_the_papers_has_one():
    elsewhere = {"p5-heads"}  # its students are spoiled in `test_heads`
    assert {name for name in all_claims() if name.startswith("p5-")} == set(PLANTED) | elsewhere
