"""A wrong value planted in what a claim of paper 0 rests on changes its verdict."""

import math
from dataclasses import replace

import pytest
import torch

from tests.lab.claims.claim.test_claims_can_fail import (
    assert_planted_value_matters,
    by_cost,
    scaled,
    with_argument,
    with_field,
)
from tieline.lab.limits.two_cells import normal_density


def other_temperature(change):
    """A function that takes a function of the temperature for the temperature."""
    return lambda real: lambda scores, epsilon, tau=1.0: real(scores, epsilon, change(tau))


def soft_at(change):
    """A risk at another temperature; the hard risk stays."""

    def wrong(real):
        def call(student, teacher, tau=None, **kwargs):
            temperature = {} if tau is None else {"tau": change(tau)}
            return real(student, teacher, **temperature, **kwargs)

        return call

    return wrong


def inverse(matching):
    """The permutation read in the other direction."""
    order = matching.permutation
    return tuple(order.index(expert) for expert in range(len(order)))


def without_covariance(real):
    """Inputs without their covariance."""
    return lambda run, n: run.normal(n, 2, stream=1)


PLANTED = {
    # inputs of bounded support in place of Gaussian ones
    "p0-asm5.1": ("teacher_recovery.largest_affine_output", lambda real: lambda run, n: 2.0),
    # experts with intercepts
    "p0-asm5.2": ("teacher_recovery.through_origin_risk", scaled(0.0)),
    # a disc taken for a half-plane
    "p0-asm5.3": (
        "teacher_recovery.least_misrouted",
        lambda real: lambda x, inside: real(x, x[:, 0] > 0),
    ),
    # a power that f⁴ does not allow
    "p0-rem5.6": ("landscape.conditional_square", scaled(2.0)),
    "p0-rem5.9": ("landscape.conditional_square", scaled(2.0)),
    "p0-rem5.18": ("teacher_recovery.gaussian_risk", scaled(0.9)),
    # outputs half as large
    "p0-eq5.15": ("teacher_recovery.drawn_pupil", lambda real: lambda run, n, distance: (
        real(run, n, 1.5)
    )),
    # minimisers of another temperature
    "p0-sec7": ("teacher_recovery.least_risk_student", lambda real: lambda tau: real(0.02 / tau)),
    # scores of experts taken for outputs
    "p0-sec2-gauge": ("boundary_mass.soft_predictions", lambda real: lambda s, tau: s.scores[:, 0]),
    "p0-def3.1": ("boundary_mass.boundary_mass_pair", with_argument(1, 1.1)),
    # the temperature forgotten
    "p0-rem3.2": ("boundary_mass.torch.sigmoid", lambda real: lambda x: real(0.3 * x)),
    "p0-rem3.3": ("boundary_mass.ambiguity_mass", other_temperature(lambda tau: 1.0)),
    "p0-eq5.3": ("boundary_mass.ambiguity_mass", other_temperature(lambda tau: 1.0)),
    "p0-rem5.4": ("boundary_mass.ambiguity_mass", with_argument(2, 5.0)),
    # the widest gap of all pairs for the smallest
    "p0-sec2-pair": ("boundary_mass.pair_gap", lambda real: lambda s: s.amax(1) - s.amin(1)),
    # ∂S/∂x_1 without the slope of x_1 itself
    "p0-asm3.4": ("boundary_mass.GraphRouter.gradient", lambda real: lambda self, x: (
        real(self, x) - torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    )),
    # the surface integral of p in place of p/‖∇S‖
    "p0-eq3.8": ("boundary_mass.GraphRouter.on_surface", lambda real: lambda self, y, level: (
        normal_density(self.height(y, level))
    )),
    # log(1/ε) for log((1-ε)/ε)
    "p0-prop3.5": ("boundary_mass.KAPPA", lambda real: math.log(10)),
    "p0-lem3.6": ("boundary_mass.GraphRouter.mass", scaled(1.01)),
    # one side of each wall
    "p0-eq3.9": ("boundary_mass.pair_mass", lambda real: lambda *args: (
        real(*args)[0], real(*args)[1] / 2
    )),
    "p0-prop3.7": ("boundary_mass.normal_density", scaled(0.5)),
    "p0-ex3.8": ("boundary_mass.gaussian_boundary_mass", with_argument(1, 1.1)),
    "p0-lem5.7": ("boundary_mass.ambiguity_mass", other_temperature(lambda tau: tau**2)),
    "p0-lem4.1": ("soft_to_hard_limit.top_gap", scaled(1.1)),
    # squared margins
    "p0-asm4.2": ("soft_to_hard_limit.margin_tail", lambda real: lambda gaps: real(gaps.square())),
    "p0-asm4.3": ("soft_to_hard_limit.gaussian_risk", soft_at(lambda tau: tau**0.5)),
    # a layer on both sides of the wall counted twice
    "p0-cor4.4": ("soft_to_hard_limit.gaussian_slope", with_field(value=lambda f: 2 * f.value)),
    "p0-thm4.5": ("soft_to_hard_limit.gaussian_slope", with_field(value=lambda f: -f.value)),
    # the root of the risk in place of the risk
    "p0-thm4.7": ("soft_to_hard_limit.gamma_convergence", with_field(
        uniform_gaps=lambda f: tuple(gap**0.5 for gap in f.uniform_gaps)
    )),
    "p0-lem5.5": ("landscape.risk_decomposition", with_field(interior=lambda f: f.total)),
    "p0-prop5.8": ("landscape.cell_control", lambda real: lambda *args: tuple(
        replace(cell, slack=cell.slack.times(-1.0)) for cell in real(*args)
    )),
    # the traces of the two sides exchanged
    "p0-prop5.10": ("landscape.wall_variation", with_field(
        left=lambda f: f.right, right=lambda f: f.left
    )),
    "p0-lem5.16": ("teacher_recovery.misrouting_bound", with_field(paper_bound=lambda f: 0.0)),
    "p0-thm5.17-matching": ("teacher_recovery.match_experts", with_field(permutation=inverse)),
    # minimisers of the other end of the schedule
    "p0-thm5.17-recovery": ("teacher_recovery.least_risk_student", lambda real: lambda tau: (
        real(0.02 / tau)
    )),
    # curvature of a Gauss-Newton matrix, which is never negative
    "p0-thm5.17-saddles": ("teacher_recovery.find_critical_points", lambda real: lambda *a, **k: [
        replace(point, least_eigenvalue=abs(point.least_eigenvalue)) for point in real(*a, **k)
    ]),
    # the right expert counted among the wrong ones
    "p0-asm5.11": ("landscape.specialisation_gap", with_field(
        etas=lambda f: tuple(1.0 for _ in f.etas)
    )),
    "p0-asm5.12": ("landscape.torch.linalg.svdvals", lambda real: lambda x: real(x[:2])),
    # the Hessian of one temperature for all
    "p0-asm5.13": ("landscape.derivative_transfer", with_field(
        hessian_gaps=lambda f: tuple(f.hessian_gaps[0] for _ in f.hessian_gaps)
    )),
    # the gain in place of the risk
    "p0-asm5.14": ("landscape.gaussian_profile", with_field(value=lambda f: -f.value)),
    "p0-lem5.15": ("landscape.perturbed_curvature", with_field(least=lambda f: 9.0)),
    # p_1 of the score u·x in place of 2u·x
    "p0-eq6.2": ("symmetry_breaking.torch.sigmoid", lambda real: lambda x: real(x / 2)),
    "p0-eq6.3": ("symmetry_breaking.gaussian_draws", without_covariance),
    "p0-eq6.4": ("symmetry_breaking.gaussian_draws", without_covariance),
    # a step downhill
    "p0-eq6.6": ("symmetry_breaking.alignment_step", with_argument(2, -1.0)),
    # E[g(G)G³] without 1/s³
    "p0-lem6.1": ("symmetry_breaking.response_constant", lambda real: lambda g, s: (
        s**3 * real(g, s)
    )),
    "p0-lem6.2": ("symmetry_breaking.response_constant", scaled(1.001)),
    "p0-eq6.7": ("symmetry_breaking.relabelled", lambda real: lambda v, d: (-v, d)),
    # feedback against the teacher
    "p0-prop6.3": ("symmetry_breaking.operator", with_field(rayleigh=lambda f: -f.rayleigh)),
    # the temperature forgotten
    "p0-eq6.8": ("symmetry_breaking.alignment_rate", lambda real: lambda values, step, tau: (
        real(values, step, 1.0)
    )),
    "p0-eq6.10": ("symmetry_breaking.alignment_rate", with_field(ratio=lambda f: f.ratio**1.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", by_cost(PLANTED))
def test_a_planted_value_changes_the_verdict(name, monkeypatch, no_axis_checks):
    assert_planted_value_matters(name, "paper0", PLANTED, monkeypatch)
