"""A wrong value planted in what a claim of paper 2 rests on changes its verdict."""

import pytest

from tests.lab.claims.claim.test_claims_can_fail import (
    assert_planted_value_matters,
    by_cost,
    decided,
    scaled,
)
from tieline.lab.estimation import MoEParameters


def heavier(real):
    """A split whose halves do not have half the mass."""

    def call(*args):
        params = real(*args)
        bias = params.bias.clone()
        bias[:2] += 0.1
        return MoEParameters(params.router, bias, params.experts)

    return call


def by_rows_alone(real):
    """Cells of the nearest router row, whatever the experts."""

    def call(fit, truth, *rest):
        bare = (MoEParameters(p.router, p.bias, 0 * p.experts) for p in (fit, truth))
        return real(*bare, *rest)

    return call


def always_two(real):
    """The population minimiser of two experts, whatever was asked for."""
    return lambda model, target, near, **rest: real(
        model.with_experts(2), target, near=near.take([0, 1]), **rest
    )


PLANTED = {
    # a perturbed router, which sees the length of a row
    "p2-thm2-minimax": (
        "minimax.MoEModel",
        lambda real: lambda gate, *rest, **more: real("perturbed", *rest, **more),
    ),
    "p2-thm5-minimax": (
        "minimax.MoEModel",
        lambda real: lambda gate, *rest, **more: real("perturbed", *rest, **more),
    ),
    "p4-thm2-minimax": ("minimax.split_scale", heavier),
    "p2-lem2": ("minimax.le_cam", scaled(1e-4)),
    # the second max read as a min
    "p4-secB.1-bracket": (
        "minimax.bracket_pair",
        lambda real: lambda zeta, tau, bound, printed: real(zeta, tau, bound, printed=False),
    ),
    # experts moved as well
    "p2-eq6": (
        "minimax.measures_of_one_function",
        lambda real: (
            lambda run, paper, copies: (
                *real(run, paper, copies)[:2],
                MoEParameters(
                    real(run, paper, copies)[2].router,
                    real(run, paper, copies)[2].bias,
                    real(run, paper, copies)[2].experts + 0.1,
                ),
            )
        ),
    ),
    # rows of length 1 throughout
    "p2-eq18": (
        "minimax.covering_ratio",
        lambda real: lambda run, tau, length: real(run, tau, length=1.0),
    ),
    # errors that do not fall with n
    "p2-lem1": ("minimax.linear_errors", lambda real: lambda run, n, fits: real(run, 50, fits)),
    "p4-lem1": ("minimax.linear_errors", lambda real: lambda run, n, fits: real(run, 50, fits)),
    "p2-table2": ("tables.lower_perplexity", decided),
    "p2-table3": ("tables.higher_accuracy", decided),
    "p2-eq2": ("definitions.through_the_layer", scaled(1.001)),
    "p2-eq8": ("definitions.through_the_layer", scaled(1.001)),
    "p2-eq4": ("definitions.cosine_numerator", lambda real: lambda t: real((t[0] + 0.01, t[1]))),
    "p2-lem3": ("definitions.cosine_numerator", lambda real: lambda t: real((0.01, 0.0))),
    "p2-L1r": ("definitions.voronoi_loss_by_hand", scaled(1 + 1e-9)),
    "p2-eq11": ("definitions.voronoi_loss_by_hand", scaled(1 + 1e-9)),
    "p2-eq13": ("definitions.voronoi_loss_by_hand", scaled(1 + 1e-9)),
    "p2-eq5": ("definitions.voronoi_loss", by_rows_alone),
    # a rank that counts rounding as independent
    "p2-def1": ("definitions.dependent_functions", lambda real: lambda test: 0),
    "p2-def2": ("definitions.dependent_functions", lambda real: lambda test: 0),
    "p2-prop1": ("definitions.split_scale", heavier),
    "p2-thm2": ("bounds_and_rates.least_ratio", scaled(0.0)),
    "p2-thm4": ("bounds_and_rates.split_ratio", scaled(0.0)),
    # a router that was perturbed
    "p2-thm5": (
        "bounds_and_rates.MoEModel",
        lambda real: lambda gate, *rest: real("perturbed", *rest),
    ),
    "p2-sec4": ("bounds_and_rates.population_minimiser", always_two),
    "p2-thm6": ("bounds_and_rates.least_ratio", scaled(0.0)),
}


@pytest.mark.parametrize("name", by_cost(PLANTED))
def test_a_planted_value_changes_the_verdict(name, monkeypatch, no_axis_checks):
    assert_planted_value_matters(name, "paper2", PLANTED, monkeypatch)
