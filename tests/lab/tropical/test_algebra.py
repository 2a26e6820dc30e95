"""Semiring, polynomials, rational form and zonotope."""

from itertools import pairwise, product
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from tests.strategies import score_matrices, seeds
from tieline.core.errors import ParameterError, ShapeError
from tieline.core.ranking import ranked_scores
from tieline.lab.tropical import (
    TropicalPolynomial,
    elementary_symmetric,
    rational_form,
    symmetric_polynomial,
    zaslavsky,
    zonotope_counts,
)
from tieline.lab.tropical.algebra import ONE, ZERO, plus, power, times


@given(score_matrices(min_experts=3))
def test_semiring_laws(scores):
    a, b, c = scores[:, 0], scores[:, 1], scores[:, 2]
    assert torch.equal(plus(a, b), plus(b, a))
    assert torch.equal(times(a, plus(b, c)), plus(times(a, b), times(a, c)))
    assert torch.equal(plus(a, torch.full_like(a, ZERO)), a)
    assert torch.equal(times(a, torch.full_like(a, ONE)), a)
    assert torch.equal(power(a, 3), times(a, times(a, a)))
    assert torch.equal(power(torch.full_like(a, ZERO), 0), torch.zeros_like(a))


@settings(deadline=None)
@given(score_matrices(), st.data())
def test_elementary_symmetric_polynomial_is_the_sum_of_the_k_largest(scores, data):
    k = data.draw(st.integers(1, scores.shape[1]))
    assert torch.equal(elementary_symmetric(scores, k), ranked_scores(scores, k).sum(dim=-1))
    assert not elementary_symmetric(scores, 0).any()


def test_symmetric_polynomial_of_scores_is_their_elementary_symmetric_polynomial():
    r = np.random.default_rng(0)
    W, b, x = r.integers(-9, 9, (5, 3)), r.integers(-9, 9, 5), r.integers(-9, 9, (40, 3))
    for k in range(6):
        scores = torch.tensor(x @ W.T + b, dtype=torch.float64)
        expected = elementary_symmetric(scores, k).numpy()
        np.testing.assert_array_equal(symmetric_polynomial(W, b, k).evaluate(x), expected)


def test_hypersurface_is_where_the_choice_ties():
    P = symmetric_polynomial(np.array([[1.0], [-1.0], [0.0]]), np.array([0.0, 0.0, -2.0]), 1)
    points = np.array([[0.0], [1.0], [-3.0]])
    assert P.on_hypersurface(points).tolist() == [True, False, False]
    assert P.on_hypersurface(points, tolerance=2.0).tolist() == [True, True, False]
    assert P.essential().exponents.ravel().tolist() == [1.0, -1.0]


def test_newton_polytopes_of_full_flat_and_single_exponents():
    square = np.array([[0.0, 0.0], [2.0, 0.0], [1.0, 1.0], [0.0, 2.0], [2.0, 2.0], [1.0, 0.5]])
    P = TropicalPolynomial(square, np.zeros(6))
    assert P.newton_polytope().tolist() == [[0, 0], [2, 0], [0, 2], [2, 2]]
    line = TropicalPolynomial(np.array([[0.0, 0.0], [1.0, 1.0], [3.0, 3.0]]), np.zeros(3))
    assert line.newton_polytope().tolist() == [[0, 0], [3, 3]]
    point = TropicalPolynomial(np.array([[1.0, 2.0]] * 2), np.array([0.0, 1.0]))
    assert point.newton_polytope().tolist() == [[1, 2]]
    assert point.essential().coefficients.tolist() == [1.0]


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_sums_products_and_dropped_terms_keep_the_function(seed):
    r = np.random.default_rng(seed)
    P, Q = (TropicalPolynomial(r.standard_normal((5, 2)), r.standard_normal(5)) for _ in range(2))
    x = 3 * r.standard_normal((60, 2))
    p, q = P.evaluate(x), Q.evaluate(x)
    np.testing.assert_allclose(P.plus(Q).evaluate(x), np.maximum(p, q), atol=1e-12)
    np.testing.assert_allclose(P.times(Q).evaluate(x), p + q, atol=1e-12)
    np.testing.assert_allclose(P.scaled(2.5).evaluate(x), 2.5 * p, atol=1e-12)
    np.testing.assert_allclose(P.times(Q).essential().evaluate(x), p + q, atol=1e-12)


def network(seed, widths):
    r = np.random.default_rng(seed)
    return [
        (r.standard_normal((out, into)), r.standard_normal(out)) for into, out in pairwise(widths)
    ]


@pytest.mark.parametrize("widths", [(2, 1), (2, 4, 2), (3, 3, 2), (2, 3, 3, 1)])
def test_a_relu_network_is_the_difference_of_two_tropical_polynomials(widths):
    layers = network(sum(widths), widths)
    x = y = 2 * np.random.default_rng(0).standard_normal((200, widths[0]))
    for depth, (A, b) in enumerate(layers):
        y = y @ A.T + b
        y = np.maximum(y, 0) if depth + 1 < len(layers) else y
    for output, form in enumerate(rational_form(layers)):
        np.testing.assert_allclose(form.evaluate(x), y[:, output], atol=1e-10)


@pytest.mark.parametrize(("width", "dim"), [(5, 1), (6, 2), (6, 3)])
def test_zonotope_vertices_by_counting_and_by_a_convex_hull(width, dim):
    r = np.random.default_rng(width)
    V, c = r.standard_normal((width, dim)), r.standard_normal(width)
    counts = zonotope_counts(V, c)
    sums = np.array(list(product((0, 1), repeat=width))) @ np.column_stack([V, c])
    assert counts.vertices == len(ConvexHull(sums).vertices)
    assert counts.vertices == 2 * sum(comb(width - 1, j) for j in range(dim + 1))
    assert counts.upper == zaslavsky(width, dim)
    assert counts.both == 2 * sum(comb(width - 1, j) for j in range(dim))


def test_bad_input_is_refused():
    with pytest.raises(ParameterError, match="n >= 0"):
        power(torch.zeros(2), -1)
    with pytest.raises(ParameterError, match="0 <= k"):
        elementary_symmetric(torch.zeros(1, 3), 4)
    with pytest.raises(ParameterError, match="factor >= 0"):
        TropicalPolynomial(np.zeros((1, 1)), np.zeros(1)).scaled(-1.0)
    with pytest.raises(ShapeError, match="layer 1"):
        rational_form([(np.ones((2, 2)), np.ones(2)), (np.ones((1, 3)), np.ones(1))])
    with pytest.raises(ParameterError, match="terms"):
        symmetric_polynomial(np.ones((40, 1)), np.ones(40), 20)
