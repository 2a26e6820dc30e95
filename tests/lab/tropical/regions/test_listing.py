"""Listed pieces: each point lies in its piece, and sampling finds no piece that is not listed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.tropical.layers import gaussian, signature
from tests.strategies import seeds
from tieline.core.errors import ParameterError
from tieline.lab.tropical import DegenerateError, count_regions, regions


@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.data())
def test_witnesses_lie_in_pieces_that_differ_and_samples_find_no_other(
    seed, experts, width, dim, data
):
    k = data.draw(st.integers(1, experts))
    layer = gaussian(seed, experts, width, dim)
    pieces = regions(*layer, k)
    listed = [
        (tuple(coalition.tolist()), pattern.tobytes())
        for coalition, pattern in zip(pieces.coalitions, pieces.patterns, strict=True)
    ]
    assert signature(layer, k, pieces.witnesses) == listed
    assert len(set(listed)) == len(pieces)
    points = 3 * np.random.default_rng(seed).standard_normal((500, dim))
    assert set(signature(layer, k, points)) <= set(listed)


def test_margins_are_distances_to_the_nearest_wall():
    V, c = np.array([[[2.0, 0.0], [0.0, 1.0]]]), np.array([[-2.0, -1.0]])
    pieces = regions(np.zeros((1, 2)), np.zeros(1), V, c, 1)
    assert len(pieces) == 4
    np.testing.assert_allclose(pieces.margins, np.abs(pieces.witnesses - 1).min(axis=1))


def test_router_walls_count_in_the_margins():
    W, b = np.array([[1.0, 0.0], [-1.0, 0.0]]), np.zeros(2)
    V, c = np.array([[[0.0, 1.0]], [[0.0, 1.0]]]), np.full((2, 1), 0.5)
    pieces = regions(W, b, V, c, 1)
    assert len(pieces) == 4
    walls = np.minimum(np.abs(pieces.witnesses[:, 0]), np.abs(pieces.witnesses[:, 1] + 0.5))
    np.testing.assert_allclose(pieces.margins, walls)


def test_equal_experts_are_refused_where_they_could_tie_and_not_elsewhere():
    W, b, V, c = gaussian(0, 3, 2, 2)
    W[1], b[1] = W[0], b[0]
    with pytest.raises(DegenerateError, match="same router row"):
        regions(W, b, V, c, 1)
    assert len(regions(W, b, V, c, 3)) == 22


def test_walls_of_two_pairs_of_experts_may_coincide():
    W, b = np.array([[1.0], [-1.0], [2.0], [-2.0]]), np.array([0.0, 0.0, 5.0, 5.0])
    V, c = np.ones((4, 1, 1)), np.array([[9.0], [8.0], [7.0], [6.0]])
    assert len(regions(W, b, V, c, 1)) == len(set(signature((W, b, V, c), 1, _line())))
    assert len(regions(W, b, V, c, 2)) == len(set(signature((W, b, V, c), 2, _line())))


def _line():
    return (np.linspace(-30, 30, 6001) + 1e-3)[:, None]


def test_more_pieces_than_asked_for_are_refused():
    layer = gaussian(7, 8, 8, 3)
    with pytest.raises(ParameterError, match="more than max_pieces"):
        regions(*layer, 2, max_pieces=100)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 16, 8, 3, 4), (0, 8, 4, 5, 2), (2, 12, 3, 4, 3)])
def test_larger_layers_by_both_methods(shape):
    seed, experts, width, dim, k = shape
    layer = gaussian(seed, experts, width, dim)
    assert len(regions(*layer, k)) == count_regions(*layer, k)
