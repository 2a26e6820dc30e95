"""Tubes in a ball: closed forms, other integrals, sampling at 4 s.e., bounds, refusals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special

from tests.measure.routers import router
from tieline.lab.geometry.tubes import (
    ball_volume,
    sampled_tube,
    tie_tube,
    tube_fraction,
    tube_leading_term,
    uniform_ball,
)


def test_balls_have_their_volumes():
    assert [ball_volume(d) for d in range(4)] == pytest.approx([1, 2, math.pi, 4 * math.pi / 3])


@pytest.mark.parametrize("dim", [2, 3, 7, 40])
@pytest.mark.parametrize(("offset", "epsilon"), [(0.0, 0.3), (0.4, 0.1), (0.4, 0.5), (0.9, 0.3)])
def test_slabs_have_the_incomplete_beta_form_of_the_paper(dim, offset, epsilon):
    def signed(u):  # Prop. A.11 over twice the complete function
        u = max(-1.0, min(1.0, u))
        return math.copysign(special.betainc(0.5, (dim + 1) / 2, u * u), u) / 2

    exact = signed(offset + epsilon) - signed(offset - epsilon)
    fraction = tube_fraction(dim=dim, codim=1, offset=2 * offset, epsilon=2 * epsilon, radius=2)
    assert fraction == pytest.approx(exact, rel=1e-11)


@pytest.mark.parametrize(
    ("dim", "offset", "epsilon"), [(5, 0.3, 0.1), (6, 0.2, 0.4), (9, 0.0, 0.2)]
)
def test_codimension_two_agrees_with_the_double_integral(dim, offset, epsilon):
    def half(x):
        return math.sqrt(max(0.0, epsilon**2 - (x - offset) ** 2))

    integral = integrate.dblquad(
        lambda y, x: (1 - x * x - y * y) ** ((dim - 2) / 2),
        offset - epsilon,
        offset + epsilon,
        lambda x: -half(x),
        half,
        epsabs=0,
        epsrel=1e-11,
    )[0]
    exact = integral * ball_volume(dim - 2) / ball_volume(dim)
    fraction = tube_fraction(dim=dim, codim=2, offset=offset, epsilon=epsilon, radius=1)
    assert fraction == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("codim", [1, 2, 3, 7])
def test_a_flat_through_the_centre_is_a_beta_law(codim):
    fraction = tube_fraction(dim=12, codim=codim, offset=0, epsilon=0.35, radius=0.7)
    assert fraction == pytest.approx(
        special.betainc(codim / 2, (12 - codim) / 2 + 1, 0.25), rel=1e-12
    )
    near = tube_fraction(dim=12, codim=codim, offset=1e-9, epsilon=0.35, radius=0.7)
    assert near == pytest.approx(fraction, rel=1e-8)


def test_a_point_is_the_lens_of_two_balls():
    def cap(height):  # of the unit ball in three dimensions
        return math.pi * height**2 * (3 - height) / 3

    radius, offset = 0.6, 1.2
    plane = (offset**2 + 1 - radius**2) / (2 * offset)
    lens = cap(1 - plane) + radius**3 * cap(1 - (offset - plane) / radius)
    fraction = tube_fraction(dim=3, codim=3, offset=offset, epsilon=radius, radius=1)
    assert fraction == pytest.approx(lens / ball_volume(3), rel=1e-11)


@pytest.mark.parametrize(
    ("dim", "codim", "offset", "epsilon"),
    [(5, 1, 0.3, 0.1), (5, 3, 0.9, 0.4), (64, 2, 0.1, 0.2), (64, 5, 0.2, 0.3), (300, 3, 0.05, 0.1)],
)
def test_samples_agree_within_four_standard_errors(dim, codim, offset, epsilon):
    exact = tube_fraction(dim=dim, codim=codim, offset=offset, epsilon=epsilon, radius=1)
    estimate = sampled_tube(
        dim=dim, codim=codim, offset=offset, epsilon=epsilon, radius=1, samples=20_000, seed=5
    )
    assert abs(estimate.value - exact) < 4 * estimate.stderr


@given(
    st.integers(2, 60),
    st.integers(1, 6),
    st.floats(0, 2),
    st.floats(1e-6, 2.5),
    st.sampled_from([0.5, 1.0, 3.0]),
)
def test_shares_lie_under_the_leading_term_and_grow_with_the_width(
    dim, codim, offset, epsilon, radius
):
    codim = min(codim, dim)
    fraction = tube_fraction(dim=dim, codim=codim, offset=offset, epsilon=epsilon, radius=radius)
    leading = tube_leading_term(dim=dim, codim=codim, epsilon=epsilon, radius=radius)
    wider = tube_fraction(dim=dim, codim=codim, offset=offset, epsilon=1.1 * epsilon, radius=radius)
    assert 0 <= fraction <= min(1, leading) * (1 + 1e-10)
    assert fraction <= wider * (1 + 1e-10)
    scaled = tube_fraction(
        dim=dim, codim=codim, offset=2 * offset, epsilon=2 * epsilon, radius=2 * radius
    )
    assert scaled == fraction


def test_the_rest_of_the_leading_term_is_of_second_order():
    gaps = []
    for radius in (10.0, 20.0):
        exact = tube_fraction(dim=8, codim=2, offset=1, epsilon=0.5, radius=radius)
        gaps.append(tube_leading_term(dim=8, codim=2, epsilon=0.5, radius=radius) / exact - 1)
    assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.05)


def test_tiny_shares_keep_their_digits_and_far_flats_have_none():
    tiny = tube_fraction(dim=6, codim=5, offset=0.5, epsilon=1e-9, radius=1)
    density = ball_volume(1) * 0.75**0.5 / ball_volume(6)
    assert tiny == pytest.approx(density * ball_volume(5) * 1e-45, rel=1e-7)
    assert tube_fraction(dim=4, codim=2, offset=1.5, epsilon=0.4, radius=1) == 0
    assert tube_fraction(dim=4, codim=2, offset=0.5, epsilon=1.6, radius=1) == 1
    assert tube_fraction(dim=4, codim=2, offset=0.5, epsilon=0, radius=1) == 0


@pytest.mark.parametrize("order", [1, 2])
def test_ties_of_a_router_stay_under_both_bounds(order):
    weight, bias = router(5, 6, 1)
    tube = tie_tube(weight, bias, 2, order=order, epsilon=0.2, radius=4, samples=20_000)
    assert 0 < tube.sampled.value < tube.flats <= tube.leading
    assert tube.sets == math.comb(5, order + 1)


def test_two_experts_fill_their_one_flat():
    weight, bias = router(2, 5, 3)
    tube = tie_tube(weight, bias, 1, order=1, epsilon=0.3, radius=2, samples=40_000)
    assert abs(tube.sampled.value - tube.flats) < 4 * tube.sampled.stderr


def test_points_of_the_ball_are_uniform():
    x = uniform_ball(50_000, 3, 2.0)
    inside = (x.norm(dim=1) < 1).double().mean().item()
    assert x.norm(dim=1).max() < 2
    assert abs(inside - 1 / 8) < 4 * math.sqrt(7 / 64 / 50_000)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"codim": 0}, "codim=0"),
        ({"codim": 6}, "codim=6"),
        ({"offset": -0.1}, "offset=-0.1"),
        ({"epsilon": -0.2}, "epsilon=-0.2"),
        ({"radius": 0.0}, "radius=0"),
    ],
)
def test_bad_input_is_named(change, names):
    good = {"dim": 5, "codim": 2, "offset": 0.1, "epsilon": 0.1, "radius": 1.0}
    with pytest.raises(ValueError, match=names):
        tube_fraction(**{**good, **change})
