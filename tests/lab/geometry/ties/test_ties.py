"""Flats of equal scores and components: what they are made of and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.measure.routers import inputs, router
from tests.strategies import dyadic_scores, seeds
from tieline.core.ranking import topk_mask
from tieline.lab.geometry.ties import (
    nearest_tie_point,
    tie_component,
    tie_flat,
    tie_flats,
    tie_sets,
)
from tieline.measure.boundary import tie_order


@given(seeds, st.integers(2, 4))
def test_scores_are_equal_on_the_flat_and_its_nearest_point_is_a_normal(seed, tied):
    weight, bias = router(6, 5, seed)
    flat = tie_flat(weight, bias, tuple(range(tied)))
    on_it = flat.nearest + torch.randn(5, dtype=torch.float64)
    on_it -= flat.basis @ (flat.basis.T @ (on_it - flat.nearest))
    scores = (weight @ on_it + bias)[:tied]
    assert (scores - scores[0]).abs().max() < 1e-10
    assert torch.allclose(flat.normals @ flat.nearest, flat.offsets)
    assert torch.allclose(flat.basis @ (flat.basis.T @ flat.nearest), flat.nearest)
    assert flat.distance == pytest.approx(flat.nearest.norm().item())
    gram = flat.normals @ flat.normals.T
    assert flat.kappa == pytest.approx(torch.linalg.det(gram).rsqrt().item())


@pytest.mark.parametrize("order", [1, 2, 3])
def test_many_flats_at_once_agree_with_each(order):
    weight, bias = router(6, 7, 3)
    sets = tie_sets(6, order)
    flats = tie_flats(weight, bias, sets)
    for m, experts in enumerate(sets.tolist()):
        flat = tie_flat(weight, bias, tuple(experts))
        inverse = torch.linalg.inv(flat.normals @ flat.normals.T)
        assert torch.allclose(flats.inverse_grams[m], inverse)
        assert flats.distances[m].item() == pytest.approx(flat.distance)
        assert flats.kappas[m].item() == pytest.approx(flat.kappa)


def test_orthonormal_rows_have_the_known_gram_determinant():
    for order in (1, 2, 5):
        flats = tie_flats(torch.eye(7, 9), None, tie_sets(7, order))
        assert torch.allclose(flats.kappas, torch.full_like(flats.kappas, (order + 1) ** -0.5))
        assert flats.distances.abs().max() == 0


@given(seeds, st.integers(1, 7), st.sampled_from([0.0625, 0.3]))
def test_components_hold_the_tied_experts_and_those_above(seed, k, epsilon):
    scores = dyadic_scores(seed)
    component = tie_component(scores, k, epsilon)
    assert torch.equal(component.order, tie_order(scores, k, epsilon))
    crossing = component.order > 0
    assert torch.equal(component.tied.sum(dim=1)[crossing], component.order[crossing] + 1)
    assert not component.tied[~crossing].any()
    above, tied = component.above.sum(dim=1), component.tied.sum(dim=1)
    assert ((above <= k - 1) & (above + tied >= k + 1))[crossing].all()
    assert torch.equal(component.above[~crossing], topk_mask(scores, k)[~crossing])
    assert not (component.above & component.tied).any()


def test_the_component_of_a_projection_is_its_tie():
    weight, bias = router(7, 9, 2)
    point = nearest_tie_point(inputs(40, 9), weight, bias, 3, order=2)
    component = tie_component(point.point @ weight.T + bias, 3, 1e-9)
    assert (component.order == 2).all()
    assert torch.equal(
        component.tied.nonzero()[:, 1].reshape(-1, 3), point.experts.sort(dim=1).values
    )


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda: tie_sets(4, 4), "order=4"),
        (lambda: tie_sets(200, 5), "tie sets"),
        (lambda: tie_flat(torch.eye(3), None, (1, 1)), r"\(1, 1\)"),
        (lambda: tie_flat(torch.eye(3), None, (0, 3)), r"\(0, 3\)"),
        (lambda: tie_flat(torch.zeros(3, 2), None, (0, 1)), "rank-deficient"),
        (lambda: tie_flat(torch.eye(4)[:, :1], None, (0, 1, 2)), "rank-deficient"),
        (lambda: tie_flats(torch.ones(3, 4), None, tie_sets(3, 1)), r"experts \[0, 1\]"),
        (lambda: tie_component(torch.zeros(1, 3), 3, 0.1), "k=3"),
        (lambda: tie_component(torch.zeros(1, 3), 1, -0.1), "-0.1"),
    ],
)
def test_bad_input_is_named(ask, names):
    with pytest.raises(ValueError, match=names):
        ask()
