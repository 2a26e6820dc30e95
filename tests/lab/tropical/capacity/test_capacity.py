"""Bounds of paper 3 and the sharper one, against enumeration and exact counts."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieline.core.errors import ParameterError
from tieline.lab.tropical import (
    attainability,
    capacity_bound,
    cell_bound,
    count_cells,
    count_regions,
    group_coalitions,
    paper_capacities,
    sharp_bound,
    zaslavsky,
)


def test_zaslavsky_sums_binomials():
    assert [zaslavsky(3, d) for d in range(5)] == [1, 4, 7, 8, 8]
    assert zaslavsky(0, 3) == 1
    assert zaslavsky(20, 5) == 21700


def test_example_4_21_gives_the_papers_bounds():
    capacities = paper_capacities(16, 4, 5, 5)
    assert capacities == (21_700, 347_200, 39_494_000, 1820 * 32)
    assert capacity_bound(16, 4, 5, 5) == 39_494_000
    assert sharp_bound(16, 4, 5, 5) == 21_640_016


shapes = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 4)).flatmap(
    lambda s: st.tuples(st.just(s[0]), st.integers(1, s[0]), st.just(s[1]), st.just(s[2]))
)


@given(shapes)
@settings(max_examples=40, deadline=None)
def test_sharp_bound_is_its_sum_over_sets_of_neurons(shape):
    n, k, width, dim = shape
    owners = [e for e in range(n) for _ in range(width)]
    total = 0
    for j in range(dim + 1):
        for chosen in combinations(range(len(owners)), j):
            touched = len({owners[i] for i in chosen})
            if touched <= k:
                total += min(comb(n - touched, k - touched), cell_bound(n, k, dim - j))
    assert sharp_bound(*shape) == total <= capacity_bound(*shape)


@pytest.mark.parametrize(("n", "k", "width", "dim"), [(5, 2, 2, 2), (6, 3, 2, 3), (4, 1, 3, 2)])
def test_no_layer_has_more_pieces_than_the_bounds_allow(n, k, width, dim):
    for seed in range(10):
        r = np.random.default_rng(seed)
        W, b = r.standard_normal((n, dim)), r.standard_normal(n)
        V, c = r.standard_normal((n, width, dim)), r.standard_normal((n, width))
        pieces = count_regions(W, b, V, c, k)
        assert pieces <= sharp_bound(n, k, width, dim) <= capacity_bound(n, k, width, dim)
        assert count_cells(W, b, k) <= cell_bound(n, k, dim)


@pytest.mark.parametrize(("n", "k", "dim"), [(4, 2, 3), (5, 2, 4), (6, 2, 1), (7, 3, 2), (6, 3, 1)])
def test_attainability_is_what_random_routers_show(n, k, dim):
    description = attainability(n, k, dim)
    counts = {
        int(count_cells(r.standard_normal((n, dim)), r.standard_normal(n), k))
        for r in map(np.random.default_rng, range(8))
    }
    assert description == ("by every generic router" if dim >= n - 1 else "by none")
    assert (counts == {comb(n, k)}) == (dim >= n - 1)


@pytest.mark.parametrize(("n", "k", "dim"), [(6, 1, 1), (6, 1, 2), (7, 2, 3), (7, 2, 4), (7, 5, 3)])
def test_some_routers_attain_all_cells_with_weights_on_the_moment_curve(n, k, dim):
    assert attainability(n, k, dim) == "by some routers"
    t = np.linspace(-1, 1, n) + 0.01 * np.random.default_rng(0).standard_normal(n)
    few = min(k, n - k)
    sign = -1 if k == few else 1
    W = np.stack([t**p for p in range(1, dim + 1)], axis=1)
    b = sign * t ** (dim + 1) if 2 * few == dim + 1 else np.zeros(n)
    assert count_cells(W, b, k) == comb(n, k) or b.any() == 0  # without bias: cones, tested below
    if not b.any():
        W, b = W[:, :-1], sign * W[:, -1]  # the same points with one coordinate as bias
        assert count_cells(W, b, k) == comb(n, k)


def test_between_the_conditions_nothing_is_claimed():
    assert attainability(6, 3, 3) == "not decided"
    assert attainability(6, 6, 0) == "by every generic router"


@given(st.integers(1, 4), st.integers(1, 3), st.data())
@settings(max_examples=30, deadline=None)
def test_group_coalitions_match_enumeration(groups, size, data):
    n = groups * size
    k, most = data.draw(st.integers(1, n)), data.draw(st.integers(1, groups))
    sets = combinations(range(n), k)
    expected = sum(len({i // size for i in chosen}) <= most for chosen in sets)
    assert group_coalitions(n, k, groups, most) == expected


def test_deepseek_groups_leave_a_sixth_of_the_coalitions():
    assert group_coalitions(256, 8, 8, 4) / comb(256, 8) == pytest.approx(0.1748, abs=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zaslavsky(-1, 2), "n >= 0"),
        (lambda: capacity_bound(4, 5, 1, 2), "0 <= k <= N"),
        (lambda: capacity_bound(4, 2, 0, 2), "width H >= 1"),
        (lambda: sharp_bound(4, 2, 1, -1), "dimension d >= 0"),
        (lambda: group_coalitions(6, 2, 4, 2), "equal groups"),
        (lambda: group_coalitions(6, 2, 3, 4), "k_groups <= n_groups"),
    ],
)
def test_numbers_out_of_range_are_refused(call, message):
    with pytest.raises(ParameterError, match=message):
        call()
