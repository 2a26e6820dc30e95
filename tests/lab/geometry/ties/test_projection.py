"""Distances to ties of any order against quadratic programmes, and the points that attain them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.measure.programmes import programme_distance
from tests.measure.routers import inputs, router
from tests.strategies import seeds
from tieline.lab.geometry import ties as projection
from tieline.lab.geometry.ties import distance_to_tie, nearest_tie_point, tie_component


@settings(max_examples=40)
@given(seeds, st.integers(3, 6), st.integers(2, 6), st.integers(1, 5), st.integers(1, 3))
def test_distances_agree_with_quadratic_programmes(seed, experts, width, k, order):
    k, order = min(k, experts - 1), min(order, experts - 1, width)
    weight, bias = router(experts, width, seed)
    x = inputs(2, width, seed)
    distances = distance_to_tie(x, weight, bias, k, order)
    for row, distance in zip(x.numpy(), distances.tolist(), strict=True):
        exact = programme_distance(row, weight.numpy(), bias.numpy(), k, order)
        assert distance == pytest.approx(exact, rel=0, abs=1e-8)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_points_lie_on_ties_of_that_order_at_that_distance(order):
    weight, bias = router(9, 12, 4)
    x = inputs(60, 12)
    ties = nearest_tie_point(x, weight, bias, 3, order)
    assert torch.allclose((x - ties.point).norm(dim=1), ties.distance, atol=1e-12)
    assert torch.allclose(ties.normal * ties.distance[:, None], x - ties.point, atol=1e-12)
    assert torch.allclose(ties.normal.norm(dim=1), torch.ones(60, dtype=torch.float64))
    assert (tie_component(ties.point @ weight.T + bias, 3, 1e-9).order >= order).all()
    assert torch.allclose(ties.distance, distance_to_tie(x, weight, bias, 3, order))


def test_higher_orders_are_further_and_shapes_are_kept():
    weight, bias = router(8, 10, 5)
    x = inputs(30, 10).reshape(5, 6, 10)
    near = [distance_to_tie(x, weight, bias, 2, order) for order in (1, 2, 3)]
    assert near[0].shape == (5, 6)
    assert (near[0] <= near[1]).all()
    assert (near[1] <= near[2]).all()
    assert distance_to_tie(x[0, 0], weight, None, 2).shape == ()


def test_orthonormal_rows_have_a_closed_form():
    scores = torch.tensor([[5.0, 2.0, 1.0, -1.0]], dtype=torch.float64)
    weight = torch.eye(4, dtype=torch.float64)
    assert distance_to_tie(scores, weight, None, 1).item() == pytest.approx(3 / math.sqrt(2))
    mean = (5 + 2 + 1) / 3
    exact = math.sqrt((5 - mean) ** 2 + (2 - mean) ** 2 + (1 - mean) ** 2)
    assert distance_to_tie(scores, weight, None, 1, order=2).item() == pytest.approx(exact)


def test_a_point_on_the_tie_has_distance_zero_and_a_normal():
    weight, bias = router(6, 8, 7)
    for order in (1, 2):
        first = nearest_tie_point(inputs(20, 8), weight, bias, 2, order)
        again = nearest_tie_point(first.point, weight, bias, 2, order)
        assert again.distance.max() < 1e-12
        assert torch.allclose(again.normal.norm(dim=1), torch.ones(20, dtype=torch.float64))


def test_chunks_and_later_tries_find_the_same(monkeypatch):
    weight, bias = router(9, 6, 8)
    x = inputs(25, 6)
    distances = distance_to_tie(x, weight, bias, 4, order=2)
    monkeypatch.setattr(projection, "MOST_ENTRIES", 1000)
    monkeypatch.setattr(projection, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(projection, "FLATS_TRIED_FIRST", 1)
    assert torch.allclose(distance_to_tie(x, weight, bias, 4, order=2), distances)


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda x, w: distance_to_tie(x, w, None, 0), "k=0"),
        (lambda x, w: distance_to_tie(x, w, None, 4), "k=4"),
        (lambda x, w: distance_to_tie(x, w, None, 2, order=4), "order=4"),
        (lambda x, w: distance_to_tie(x, w, None, 2, order=0), "order=0"),
        (lambda x, w: distance_to_tie(x, torch.ones_like(w), None, 2, order=2), "rank-deficient"),
        (lambda x, w: distance_to_tie(x[:, :1], w[:, :1], None, 2, order=2), "rank-deficient"),
        (lambda x, w: distance_to_tie(x, w * torch.inf, None, 2), "finite"),
    ],
)
def test_bad_input_is_named(ask, names):
    with pytest.raises(ValueError, match=names):
        ask(inputs(3, 5), router(4, 5)[0])


@pytest.mark.usefixtures("no_axis_checks")
def test_widths_and_biases_that_do_not_fit_are_refused():
    weight = router(4, 5)[0]
    with pytest.raises(ValueError, match=r"shape\[1\]"):
        distance_to_tie(inputs(3, 6), weight, None, 2)
    with pytest.raises(ValueError, match="3 biases"):
        distance_to_tie(inputs(3, 5), weight, torch.zeros(3), 2)
