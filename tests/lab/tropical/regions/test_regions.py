"""Exact counts of pieces: fixed integers, three methods against each other, degenerate input."""

from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.tropical.layers import gaussian, integers
from tests.strategies import seeds
from tieline.core.errors import ParameterError, ShapeError, TielineError
from tieline.lab.tropical import (
    DegenerateError,
    capacity_bound,
    count_regions,
    count_regions_rational,
    regions,
    sharp_bound,
    zaslavsky,
)

KNOWN = [(1, 4, 3, 2, 1, 16), (4, 8, 4, 2, 3, 161), (5, 6, 2, 3, 2, 74), (7, 8, 8, 3, 2, 1233)]


@pytest.mark.parametrize(("seed", "experts", "width", "dim", "k", "pieces"), KNOWN)
def test_known_integers_by_flat_sum_and_by_listing(seed, experts, width, dim, k, pieces):
    layer = gaussian(seed, experts, width, dim)
    assert count_regions(*layer, k) == pieces
    assert len(regions(*layer, k)) == pieces


@pytest.mark.parametrize(("seed", "experts", "width", "dim", "k", "pieces"), KNOWN[:3])
def test_known_integers_by_fractions(seed, experts, width, dim, k, pieces):
    assert count_regions_rational(*gaussian(seed, experts, width, dim), k) == pieces


def test_walls_of_experts_that_are_never_chosen_together_may_meet_in_a_corner():
    W, b = np.array([[1, 0], [-1, 0]]), np.zeros(2)
    V, c = np.array([[[1, 1], [2, -3]], [[-3, 1], [1, 3]]]), np.array([[2, 5], [2, 7]])
    assert not (V[:, 0] @ [0, -2] + c[:, 0]).any()  # the first neurons vanish there, on the tie
    assert count_regions_rational(W, b, V, c, 1) == count_regions(W, b, V, c, 1)
    assert count_regions(W, b, V, c, 1) == len(regions(W, b, V, c, 1))


def outcome(count, layer, k):
    try:
        return int(count(*layer, k))
    except DegenerateError:
        return None


@settings(max_examples=60, deadline=None)
@given(
    seeds, st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.data(),
    st.sampled_from([2, 5, 30]), st.sampled_from(["affine", "no router bias", "no bias", "no c"]),
)  # fmt: skip
def test_three_methods_never_differ_on_integer_layers(seed, experts, width, dim, data, size, kind):
    W, b, V, c = integers(seed, experts, width, dim, size)
    b = b * (kind in ("affine", "no c"))
    c = c * (kind in ("affine", "no router bias"))
    k = data.draw(st.integers(1, experts))
    layer = W, b, V, c
    answers = {
        outcome(count_regions, layer, k),
        outcome(count_regions_rational, layer, k),
        outcome(lambda *a: len(regions(*a)), layer, k),
    }
    assert len(answers - {None}) <= 1


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 6), st.integers(1, 3), st.integers(1, 5), st.data())
def test_gaussian_layers_lie_below_their_bounds(seed, experts, width, dim, data):
    k = data.draw(st.integers(1, experts))
    layer = gaussian(seed, experts, width, dim)
    pieces = count_regions(*layer, k)
    assert pieces <= sharp_bound(experts, k, width, dim) <= capacity_bound(experts, k, width, dim)
    if zaslavsky(k * width, dim) < 200:
        assert pieces == len(regions(*layer, k))


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("experts", [1, 3])
def test_dense_networks_and_k_equal_n_have_the_pieces_of_one_arrangement(experts, dim):
    layer = gaussian(3, experts, 6 // experts, dim)
    assert count_regions(*layer, experts) == zaslavsky(6, dim)


def test_few_experts_in_many_dimensions_have_every_piece():
    assert count_regions(*gaussian(0, 3, 1, 5), 2) == comb(3, 2) * 2**2


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_dense_networks_without_bias_have_the_cones_of_a_central_arrangement(dim):
    W, b, V, c = gaussian(1, 1, 7, dim)
    expected = 2 * sum(comb(6, j) for j in range(dim))
    assert count_regions(W, b, V, 0 * c, 1) == len(regions(W, b, V, 0 * c, 1)) == expected


@pytest.mark.parametrize(("b_on", "c_on"), [(0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize(("experts", "k", "dim"), [(4, 2, 1), (5, 2, 2), (6, 3, 3), (5, 1, 4)])
def test_layers_without_some_biases_are_counted(b_on, c_on, experts, k, dim):
    W, b, V, c = gaussian(experts, experts, 2, dim)
    layer = W, b_on * b, V, c_on * c
    assert count_regions(*layer, k) == len(regions(*layer, k))


def test_counts_do_not_depend_on_order_scale_shift_or_rotation_of_what_does_not_matter():
    W, b, V, c = gaussian(9, 6, 3, 3)
    pieces = count_regions(W, b, V, c, 2)
    order = np.random.default_rng(0).permutation(6)
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((3, 3)))[0]
    move = np.array([3.0, -1.0, 2.0])
    scale = np.random.default_rng(2).uniform(0.1, 9.0, (6, 3))
    assert count_regions(W[order], b[order], V[order], c[order], 2) == pieces
    assert count_regions(5 * W + move, 5 * b - 7, V, c, 2) == pieces
    assert count_regions(W @ turn, b, V @ turn, c, 2) == pieces
    assert count_regions(W, b + W @ move, V, c + V @ move, 2) == pieces
    assert count_regions(W, b, V * scale[..., None], c * scale, 2) == pieces
    assert count_regions(W / 1e6, b, V / 1e6, c, 2) == pieces


def test_torch_input_of_low_precision_is_counted_as_it_is():
    layer = [torch.from_numpy(a).to(torch.float32) for a in gaussian(4, 8, 4, 2)]
    assert count_regions(*layer, 3) == count_regions(*(a.numpy() for a in layer), 3)


def test_a_count_says_what_it_counts():
    count = count_regions(*gaussian(1, 4, 3, 2), 1)
    assert "softmax" in count.counted
    assert count.method == "flat sum"
    assert count.safety > 1


LINES = np.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
ONE = np.zeros((1, 2)), np.zeros(1)


@pytest.mark.parametrize(
    ("V", "c", "pieces"),
    [
        (LINES, [[0.0, 0.0, 1.0]], 7),
        ([[[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]], [[0.0, 1.0, 0.5]], 6),  # parallel
        (LINES, [[1.0, 1.0, 2.0]], 6),  # through one point
        ([[[1.0, 0.0], [2.0, 0.0], [1.0, 1.0]]], [[1.0, 2.0, 0.5]], 4),  # repeated
        ([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]], [[0.0, 1.0, 2.0]], 4),  # all parallel
    ],
)
def test_example_4_9_is_counted_or_refused_and_always_listed(V, c, pieces):
    layer = (*ONE, np.array(V), np.array(c))
    assert len(regions(*layer, 1)) == pieces
    assert outcome(count_regions, layer, 1) == (7 if pieces == 7 else None)


def test_degenerate_routers_and_neurons_are_refused_by_name():
    W, b, V, c = gaussian(2, 4, 2, 2)
    twin = np.array(W)
    twin[1] = twin[0]
    with pytest.raises(DegenerateError, match="experts 0 and 1"):
        count_regions(twin, b, V, c, 2)
    dead = np.array(V)
    dead[2, 1] = 0
    with pytest.raises(DegenerateError, match=r"\(2, 1\) has zero weights"):
        count_regions(W, b, dead, c, 2)
    repeated = np.array(V), np.array(c)
    repeated[0][1, 0], repeated[1][1, 0] = -3 * V[0, 1], -3 * c[0, 1]
    with pytest.raises(DegenerateError, match="neurons 1 and 2"):
        count_regions(W, b, *repeated, 2)


def test_a_third_wall_almost_through_a_corner_is_refused():
    near = np.array([[1.0, 1.0, 2.0 + 1e-13]])
    with pytest.raises(DegenerateError, match="meet in a point"):
        count_regions(*ONE, LINES, near, 1)
    assert count_regions(*ONE, LINES, np.array([[1.0, 1.0, 2.0 + 1e-6]]), 1) == 7


def test_bad_input_is_refused_in_words():
    W, b, V, c = gaussian(0, 3, 2, 2)
    for k in (0, 4, -1):
        with pytest.raises(ParameterError, match="1 <= k <= N"):
            count_regions(W, b, V, c, k)
    with pytest.raises(ParameterError, match="not finite"):
        count_regions(W * np.nan, b, V, c, 1)
    with pytest.raises(ParameterError, match=r"d <= 5.*expected_regions"):
        count_regions(*gaussian(0, 3, 2, 6), 1)
    with pytest.raises(ParameterError, match="d <= 5"):
        regions(*gaussian(0, 3, 2, 6), 1)
    with pytest.raises((ShapeError, TypeError, TielineError)):
        count_regions(W, b, V[:2], c, 1)
