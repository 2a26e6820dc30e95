"""Lee's formula against the exact count of the same router."""

import numpy as np
import pytest

from tieline.core.errors import ParameterError
from tieline.lab.tropical import count_cells, expected_voronoi_cells, k_sets, voronoi_cells


@pytest.mark.parametrize("seed", range(6))
def test_lees_formula_counts_the_cells_of_the_router(seed):
    points = np.random.default_rng(seed).standard_normal((7, 2))
    bias = -(points**2).sum(axis=1) / 2
    for k in range(1, 7):
        assert voronoi_cells(points, k) == count_cells(points, bias, k)


@pytest.mark.parametrize("seed", range(4))
def test_k_sets_are_the_cells_of_the_router_without_bias(seed):
    points = np.random.default_rng(seed).standard_normal((8, 2))
    counted = [int(count_cells(points, np.zeros(8), k)) for k in range(1, 8)]
    assert k_sets(points).tolist() == counted


def test_the_expectation_meets_the_mean():
    counts = [
        voronoi_cells(np.random.default_rng(s).standard_normal((10, 2)), 4) for s in range(80)
    ]
    error = np.std(counts, ddof=1) / np.sqrt(80)
    assert abs(np.mean(counts) - expected_voronoi_cells(10, 4)) < 3 * error
    assert expected_voronoi_cells(10, 1) == 10


def test_special_positions_are_refused():
    line = np.array([[0.0, 0], [1, 1], [2, 2], [0, 3]])
    with pytest.raises(ParameterError, match="lie on one line"):
        k_sets(line)
    square = np.array([[0.0, 0], [1, 0], [0, 1], [1, 1], [0.3, 2.2]])
    with pytest.raises(ParameterError, match="lie on one circle"):
        voronoi_cells(square, 2)
    with pytest.raises(ParameterError, match="1 <= k < n"):
        voronoi_cells(np.random.default_rng(0).standard_normal((4, 2)), 4)
    with pytest.raises(ParameterError, match="at most 128"):
        voronoi_cells(np.random.default_rng(0).standard_normal((129, 2)), 4)
