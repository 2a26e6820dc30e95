"""A wrong value planted in what a claim of paper 4 rests on changes its verdict."""

import pytest

from tests.lab.claims.claim.test_claims_can_fail import (
    assert_planted_value_matters,
    by_cost,
    with_field,
)
from tests.lab.claims.paper2.test_planted import heavier
from tieline.lab.estimation import MoEParameters
from tieline.lab.estimation.derivative_tests import Atom


def uncorrected(real):
    """A split of b without the change of A that hides it."""

    def call(*args):
        params = real(*args)
        rows = params.router.clone()
        rows[:2, :4] = 0
        return MoEParameters(rows, params.bias, params.experts)

    return call


def swapped(real):
    """Fit and truth exchanged."""
    return lambda **kwargs: real(**kwargs)[::-1]


def unbalanced(real):
    """The second atom of a split left under the true gate."""

    def call(truth, *rest):
        pair = real(truth, *rest)
        pair[1, 0] = truth[0]
        return pair

    return call


def squared(real):
    """A loss whose square was taken."""
    return lambda truth: lambda atoms: real(truth)(atoms).square()


def twins(real):
    """The second atom drawn as the first one again."""

    def call(*args, **kwargs):
        atoms = real(*args, **kwargs)
        return atoms.take([0, 0, *range(2, atoms.n_experts)])

    return call


PLANTED = {
    # gates without row
    "p4-sec3": ("definitions.least_two_gates", lambda real: lambda score, bound: (
        real(0 * score, bound)
    )),
    "p4-secC.1.2": ("definitions.split_scale", heavier),
    "p4-sec2": ("definitions.attention_as_moe", lambda real: lambda *args, **kwargs: (
        real(*args, **kwargs, scale=1.0)
    )),
    "p4-eq5": ("definitions.core_router", lambda real: lambda params, kind: (
        real(MoEParameters(params.router, params.bias + 0.01, params.experts), kind)
    )),
    "p4-eq8": ("definitions.gated_expert", lambda real: lambda t, x: real(t, x) + t[4] * t[5]),
    "p4-def2": ("definitions.dependent_functions", lambda real: lambda test: 1),
    # the opposite row without its constant
    "p4-def4": ("definitions.opposite_atoms", lambda real: lambda model: [
        real(model)[0], Atom(real(model)[1].row, real(model)[0].bias, real(model)[0].expert)
    ]),
    "p4-prop2": ("definitions.split_scale", heavier),
    "p4-thm1": ("bounds_and_rates.split_along_b", uncorrected),
    "p4-thm2": ("bounds_and_rates.split_scale", heavier),
    # a split that is not balanced: the first order does not cancel
    "p4-thm3": ("bounds_and_rates.split_atoms", unbalanced),
    "p4-thm5": ("bounds_and_rates.split_atoms", unbalanced),
    "p4-thm1-rate": ("split_rates.atom_pair_loss", squared),
    "p4-thm3-rate": ("split_rates.best_measure_loss", squared),
    "p4-thm4-rate": ("split_rates.atom_pair_loss", squared),
    "p4-thm5-rate": ("split_rates.best_measure_loss", squared),

    "p4-thm4": ("bounds_and_rates.split_scale", heavier),
    # inputs off the cube
    "p4-prop3": ("definitions.ClaimRun.uniform", lambda real: lambda *args: 10 * real(*args)),
    # a rank that counts rounding as independent
    "p4-def1": ("definitions.dependent_functions", lambda real: lambda test: 0),
    "p4-def3": ("definitions.split_checks", lambda real: lambda run, family, cases: (
        real(run, lambda expert: family("tanh"), cases)
    )),
    "p4-prop5": ("definitions.drawn_mixture", twins),
    "p4-L1": ("definitions.sigmoid_loss_example", swapped),
    "p4-eq11": ("definitions.sigmoid_loss_example", swapped),
    "p4-eq52": ("definitions.sigmoid_loss_example", swapped),
    "p4-eq53": ("definitions.sigmoid_loss_example", swapped),
    "p4-L3": ("definitions.voronoi_loss", with_field(value=lambda loss: loss.value + 0.01)),
}  # fmt: skip


@pytest.mark.parametrize("name", by_cost(PLANTED))
def test_a_planted_value_changes_the_verdict(name, monkeypatch, no_axis_checks):
    assert_planted_value_matters(name, "paper4", PLANTED, monkeypatch)
