"""Quadratures against closed forms, adaptive integration, a grid in the plane, and sampling."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import integrate, special

from tests.lab.limits.problems import (
    COVARIANCE,
    SAME_WALL,
    STUDENT,
    TEACHER,
    line,
    mixtures,
    sample,
    signs,
    within,
)
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import (
    ambiguity_width,
    gaussian_boundary_mass,
    gaussian_decomposition,
    gaussian_grid,
    gaussian_profile,
    gaussian_risk,
    hard_risk,
    population_risk,
    slices,
    soft_risk,
)


@pytest.mark.parametrize("angle", [1e-12, 1e-6, 0.01, 0.7, math.pi / 2, 3.0])
def test_the_hard_risk_of_signs_is_the_angle_between_the_walls(angle):
    risk = gaussian_risk(signs(angle), signs(0.0)).item()
    assert risk == pytest.approx(4 * angle / math.pi, rel=1e-11, abs=1e-15)


def reference_on_the_line(student, teacher, tau):
    """∫ (μ - h)² φ by adaptive integration with the jumps given."""

    def loss(x):
        point = torch.tensor([[x]], dtype=torch.float64)
        s = (student.normal[0] * x + student.offset).item()
        p = special.expit(s / tau) if tau else float(s > 0)
        first, second = student.outputs(point)[0].tolist()
        h = p * first + (1 - p) * second
        return (
            (teacher.value(point).item() - h) ** 2 * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        )

    cuts = [-10.0, 10.0, *(-m.offset.item() / m.normal[0].item() for m in (student, teacher))]
    cuts += [cuts[2] - 30 * tau, cuts[2] + 30 * tau]
    ends = sorted({min(max(c, -10.0), 10.0) for c in cuts})
    integrals = [
        integrate.quad(loss, a, b, epsabs=1e-13, epsrel=1e-13, limit=400)[0]
        for a, b in itertools.pairwise(ends)
    ]
    return math.fsum(integrals)


@pytest.mark.parametrize("tau", [0.0, 0.003, 0.4])
@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_risks_on_the_line_meet_adaptive_integration_to_eleven_digits(tau, shift):
    student = line(offset=0.4, levels=(0.9, -1.2), slopes=(0.3, -0.5), scale=-1.5)
    teacher = line(offset=0.4 + shift, levels=(1.0, 0.2), slopes=(0.5, 0.1))
    value = gaussian_risk(student, teacher, None, tau).item()
    assert value == pytest.approx(reference_on_the_line(student, teacher, tau), rel=1e-11)


@given(mixtures(), mixtures(), st.sampled_from([0.5, 1.0]))
def test_soft_risks_agree_with_the_grid_in_the_plane(student, teacher, tau):
    grid = gaussian_grid(teacher, COVARIANCE, spacing=0.05, order=20)
    scale = tau * (1 + student.normal.norm().item())
    expected = population_risk(grid, student.flat(), scale).value
    value = gaussian_risk(student, teacher, COVARIANCE, scale).item()
    assert value == pytest.approx(expected, rel=1e-10, abs=1e-12)


@given(mixtures(), mixtures(), st.sampled_from([0.0, 0.01, 1.0]))
def test_risks_do_not_depend_on_labels_or_on_the_scale_of_router_and_temperature(a, b, tau):
    value = gaussian_risk(a, b, COVARIANCE, tau)
    for student, teacher in ((a.swapped(), b), (a, b.swapped())):
        assert torch.isclose(gaussian_risk(student, teacher, COVARIANCE, tau), value, rtol=1e-11)
    scaled = a.with_flat(torch.cat([3 * a.flat()[:3], a.flat()[3:]]))
    assert torch.isclose(gaussian_risk(scaled, b, COVARIANCE, 3 * tau), value, rtol=1e-11)


@given(mixtures())
def test_the_teacher_itself_has_no_hard_risk(cells):
    size = 1 + cells.experts.abs().max().item() ** 2
    assert abs(gaussian_risk(cells, cells, COVARIANCE).item()) < 1e-13 * size


@pytest.mark.parametrize("teacher", [TEACHER, SAME_WALL])
def test_risks_agree_with_sampling(teacher):
    drawn = sample(teacher=teacher)
    assert within(hard_risk(drawn), gaussian_risk(STUDENT, teacher, COVARIANCE).item())
    assert within(soft_risk(drawn, 0.3), gaussian_risk(STUDENT, teacher, COVARIANCE, 0.3).item())


@given(mixtures(), mixtures(), st.sampled_from([0.02, 0.5]), st.sampled_from([0.01, 0.3]))
def test_the_parts_add_up_and_the_mass_is_that_of_the_slab(student, teacher, tau, epsilon):
    decomposition = gaussian_decomposition(student, teacher, tau, epsilon, COVARIANCE)
    total = gaussian_risk(student, teacher, COVARIANCE, tau).item()
    assert decomposition.interior + decomposition.boundary == pytest.approx(
        total, rel=1e-11, abs=1e-12
    )
    slab = gaussian_boundary_mass(student, ambiguity_width(epsilon) * tau, COVARIANCE)
    assert decomposition.mass == pytest.approx(slab.exact, rel=1e-10, abs=1e-15)


@given(mixtures(), mixtures(), st.sampled_from([0.0, 0.1]))
def test_the_profile_is_the_least_risk_over_experts(wall, teacher, tau):
    mass = gaussian_boundary_mass(wall, 1.0, COVARIANCE)
    assume(abs(wall.offset.item()) < mass.spread)  # else a cell is empty and its expert undefined
    profile = gaussian_profile(wall, teacher, COVARIANCE, tau)
    best = wall.with_experts(profile.experts)
    assert torch.isclose(gaussian_risk(best, teacher, COVARIANCE, tau), profile.value, atol=1e-10)
    for shift in (0.1, -0.1):
        worse = wall.with_experts(profile.experts + shift * torch.eye(2, 3).double())
        rise = gaussian_risk(worse, teacher, COVARIANCE, tau) - profile.value
        assert rise >= profile.curvature / 2 * 2 * shift**2 * (1 - 1e-6)


def test_example_3_8_by_the_normal_distribution_function():
    spread = math.sqrt(1.8)  # vᵀΣv = 1 + 0.3 + 0.5
    b, r = 0.3 / spread, 0.1 / spread
    mass = gaussian_boundary_mass(STUDENT, 0.1, COVARIANCE)
    assert mass.exact == pytest.approx(special.ndtr(r - b) - special.ndtr(-r - b), rel=1e-12)
    assert abs(mass.next_order / mass.exact - 1) < 1e-6 < abs(mass.first_order / mass.exact - 1)
    assert mass.spread == pytest.approx(spread)
    far = gaussian_boundary_mass(line(offset=-20.0), 1.0)
    assert far.exact == pytest.approx(special.ndtr(-19.0) - special.ndtr(-21.0), rel=1e-12)
    assert far.exact > 0


def test_the_widths_of_ambiguity():
    assert ambiguity_width(0.25) == pytest.approx(math.log(3))
    assert ambiguity_width(0.25, 5) == pytest.approx(math.log(12))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian_risk(STUDENT, TEACHER, COVARIANCE, -0.1), r"tau=-0\.1"),
        (lambda: gaussian_risk(STUDENT, line()), "one dimension, got 2 and 1"),
        (lambda: gaussian_decomposition(STUDENT, TEACHER, 0.0, 0.1), "tau=0.0"),
        (lambda: gaussian_decomposition(STUDENT, TEACHER, 0.1, 0.5), "epsilon=0.5"),
        (lambda: gaussian_boundary_mass(STUDENT, -1.0), "radius=-1"),
        (lambda: ambiguity_width(0.1, 1), "n_experts=1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises((ParameterError, ShapeError), match=message):
        call()


@pytest.mark.parametrize("tau", [0.0, 1e-12, 1e-3, 1.0, 100.0])
def test_weights_of_the_rule_are_a_probability(tau):
    cut = slices(STUDENT, TEACHER, COVARIANCE, tau)
    assert cut.weight.sum().item() == pytest.approx(1, abs=1e-14)
    mean = (cut.weight * cut.score).sum().item()
    assert mean == pytest.approx(STUDENT.offset.item(), abs=1e-13)
