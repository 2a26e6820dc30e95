"""Order-k cells: their numbers, witnesses, facets and neighbours."""

import contextlib
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import seeds
from tieline.core.errors import ParameterError
from tieline.lab.tropical import (
    DegenerateError,
    cells,
    count_cells,
    count_cells_rational,
    symmetric_polynomial,
    zaslavsky,
)
from tieline.lab.tropical.affine import counting_router
from tieline.lab.tropical.cells import essential, search_cells


def router(seed, experts, dim):
    r = np.random.default_rng(seed)
    return r.standard_normal((experts, dim)), r.standard_normal(experts)


def chosen_at(W, b, k, points):
    order = np.argsort(-(points @ W.T + b), axis=1, kind="stable")
    return np.sort(order[:, :k], axis=1)


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 9), st.integers(1, 6))
def test_cells_over_all_k_sum_to_zaslavsky(seed, experts, dim):
    W, b = router(seed, experts, dim)
    assert sum(count_cells(W, b, k) for k in range(experts + 1)) == zaslavsky(experts, dim + 1)
    cones = sum(count_cells(W, 0 * b, k) for k in range(experts + 1))
    assert cones == (2 * sum(comb(experts - 1, j) for j in range(dim + 1)) if experts > 1 else 2)


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(2, 7), st.integers(1, 4), st.data())
def test_counting_listing_and_upper_vertices_agree(seed, experts, dim, data):
    k = data.draw(st.integers(0, experts))
    W, b = router(seed, experts, dim)
    partition = cells(W, b, k)
    assert len(partition) == count_cells(W, b, k)
    assert len(partition) == len(symmetric_polynomial(W, b, k).essential().coefficients)
    np.testing.assert_array_equal(chosen_at(W, b, k, partition.witnesses), partition.coalitions)
    assert (partition.margins > 0).all()


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 3), st.data())
def test_integer_routers_agree_with_fractions(seed, experts, dim, data):
    r = np.random.default_rng(seed)
    W, b = r.integers(-9, 10, (experts, dim)), r.integers(-9, 10, experts)
    k = data.draw(st.integers(0, experts))
    try:
        expected = count_cells_rational(W, b, k)
    except DegenerateError:
        return
    with contextlib.suppress(DegenerateError):
        assert count_cells(W, b, k) == expected


@pytest.mark.parametrize("dim", [2, 3])
def test_two_experts_without_bias_share_one_wall(dim):
    W, _ = router(0, 2, dim)
    facets = cells(W, np.zeros(2), 1).facets
    np.testing.assert_array_equal(facets, [[0, 0, 1, 1], [1, 1, 0, 0]])


@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(2, 6), st.integers(1, 4), st.booleans(), st.data())
def test_search_by_linear_programming_finds_the_same_diagram(seed, experts, dim, biased, data):
    k = data.draw(st.integers(1, experts - 1))
    W, b = router(seed, experts, dim)
    b = b * (biased or dim == 1)  # on a line without bias both cells meet at 0, N experts at once
    listed, searched = cells(W, b, k), search_cells(essential(counting_router(W, b, k)), k, 10_000)
    np.testing.assert_array_equal(listed.coalitions, searched.coalitions)
    np.testing.assert_array_equal(chosen_at(W, b, k, searched.witnesses), listed.coalitions)
    np.testing.assert_array_equal(listed.facets, searched.facets)


@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(2, 7), st.integers(2, 3), st.data())
def test_facets_swap_two_experts_both_ways_and_rays_leave_through_them(seed, experts, dim, data):
    k = data.draw(st.integers(1, experts - 1))
    W, b = router(seed, experts, dim)
    partition = cells(W, b, k)
    walls = {tuple(row) for row in partition.facets.tolist()}
    for cell, leaving, entering, behind in walls:
        coalition, neighbour = (
            set(partition.coalitions[cell].tolist()),
            set(partition.coalitions[behind].tolist()),
        )
        assert neighbour == coalition - {leaving} | {entering}
        assert (behind, entering, leaving, cell) in walls
    for cell, point in enumerate(partition.witnesses):
        for wall in _leaving(W, b, partition.coalitions[cell], point, seed):
            assert (cell, *wall) in {row[:3] for row in walls}
        assert len(partition.neighbours(cell)) == (partition.facets[:, 0] == cell).sum()


def _leaving(W, b, coalition, point, seed):
    """The walls through which a few random rays leave a cell."""
    inside = set(coalition.tolist())
    score = W @ point + b
    for ray in np.random.default_rng(seed).standard_normal((20, W.shape[1])):
        change, best = W @ ray, (np.inf, None)
        for i in inside:
            for j in set(range(len(b))) - inside:
                closing = change[j] - change[i]
                if closing > 0:
                    best = min(best, ((score[i] - score[j]) / closing, (i, j)))
        if best[1] is not None:
            yield best[1]


def test_the_power_diagram_of_four_sites_of_a_square():
    sites = np.array([[1.0, 0.1], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.2]])
    b = -0.5 * (sites**2).sum(axis=1)
    partition = cells(sites, b, 1)
    assert partition.coalitions.ravel().tolist() == [0, 1, 2, 3]
    distances = np.linalg.norm(partition.witnesses[:, None] - sites, axis=2)
    assert distances.argmin(axis=1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("experts", "dim"), [(3, 2), (4, 5), (6, 5)])
def test_few_experts_have_every_coalition(experts, dim):
    W, b = router(1, experts, dim)
    for k in range(experts + 1):
        assert count_cells(W, b, k) == len(cells(W, b, k)) == comb(experts, k)


def test_a_router_that_sees_two_directions_has_the_cells_of_a_plane():
    W, b = router(3, 6, 2)
    wide = W @ np.random.default_rng(0).standard_normal((2, 5))
    assert [count_cells(wide, b, k) for k in range(7)] == [count_cells(W, b, k) for k in range(7)]
    partition = cells(wide, b, 2)
    np.testing.assert_array_equal(chosen_at(wide, b, 2, partition.witnesses), partition.coalitions)


def test_one_zero_row_is_no_special_case():
    W, b = router(5, 6, 3)
    shifted = W - W[2]
    assert not shifted[2].any()
    assert count_cells(shifted, b, 3) == count_cells(W, b, 3)


def test_torch_and_numpy_give_the_same_cells():
    W, b = router(0, 7, 2)
    partition = cells(torch.from_numpy(W), torch.from_numpy(b), 3)
    np.testing.assert_array_equal(partition.coalitions, cells(W, b, 3).coalitions)


def test_three_scores_through_a_point_too_many_are_refused_only_where_they_matter():
    W = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [2.0, -3.0], [0.1, 0.2]])
    b = np.array([0.0, 0.0, 0.0, 0.0, -50.0])  # four scores meet at 0, far above the fifth
    for k in (1, 2, 3):
        with pytest.raises(DegenerateError, match="general position"):
            count_cells(W, b, k)
        with pytest.raises(DegenerateError, match="general position"):
            cells(W, b, k)
    assert count_cells(W, b, 4) == len(cells(W, b, 4))


def test_equal_rows_and_parallel_walls_are_refused_by_name():
    W, b = router(0, 5, 2)
    W[3] = W[1]
    for counter in (count_cells, cells):
        with pytest.raises(DegenerateError, match="experts 1 and 3"):
            counter(W, b, 2)
    W, b = router(0, 4, 2)
    W[3] = W[2] + (W[1] - W[0])  # walls 0|1 and 2|3 are parallel: no corner, nothing degenerate
    assert sum(count_cells(W, b, k) for k in (0, 4)) == 2
    assert _agree_or_refuse(W, b)


def _agree_or_refuse(W, b):
    for k in range(len(b) + 1):
        with contextlib.suppress(DegenerateError):
            assert count_cells(W, b, k) == count_cells_rational(W, b, k)
    return True


def test_a_router_of_equal_weights_has_one_cell_or_a_tie():
    W = np.ones((3, 2))
    assert count_cells(W, np.array([3.0, 2.0, 1.0]), 3) == 1
    with pytest.raises(DegenerateError):
        cells(W, np.zeros(3), 1)
    partition = cells(W, np.array([1.0, 3.0, 2.0]), 2)
    assert partition.coalitions.tolist() == [[1, 2]]


def test_bad_input_is_refused():
    W, b = router(0, 4, 2)
    for k in (-1, 5):
        with pytest.raises(ParameterError, match="0 <= k <= N"):
            count_cells(W, b, k)
    with pytest.raises(ParameterError, match="not finite"):
        count_cells(W, b * np.inf, 2)
    with pytest.raises(ParameterError, match=r"`cells` searches"):
        count_cells(*router(0, 64, 12), 8)


def test_the_search_stops_at_the_limit():
    router_ = essential(counting_router(*router(1, 8, 3), 3))
    with pytest.raises(ParameterError, match="more than 4 cells"):
        search_cells(router_, 3, 4)


def test_coalitions_of_more_than_64_experts_are_kept_apart():
    W, b = router(2, 70, 1)
    partition = cells(W, b, 3)
    assert len(partition) == count_cells(W, b, 3)
    assert len({tuple(c) for c in partition.coalitions.tolist()}) == len(partition)
    assert all(len(set(c)) == 3 for c in combinations(range(4), 3))
