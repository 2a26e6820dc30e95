"""Score-space distances against linear programmes, and the factor two of the paper."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.strategies import dyadic_scores, seeds
from tieline.core.ranking import gap
from tieline.lab.geometry.masses import linf_distance


def programme(scores, k, order):
    """min max_i |u_i - z_i| over u with a tie of n + 1 experts across the threshold."""
    experts, best = len(scores), np.inf
    for tied in itertools.combinations(range(experts), order + 1):
        rest = [e for e in range(experts) if e not in tied]
        for above in range(max(0, k - order), min(k - 1, len(rest)) + 1):
            for chosen in itertools.combinations(rest, above):
                best = min(best, polyhedron(scores, tied, rest, chosen))
    return best


def polyhedron(scores, tied, rest, chosen):
    experts = len(scores)
    eye, ones = np.eye(experts), np.ones((experts, 1))
    rows, right = [np.hstack([eye, -ones]), np.hstack([-eye, -ones])], [scores, -scores]
    for e in rest:
        sign = -1.0 if e in chosen else 1.0
        rows.append(np.append(sign * (eye[e] - eye[tied[0]]), 0.0)[None])
        right.append(np.zeros(1))
    equal = np.array([np.append(eye[e] - eye[tied[0]], 0.0) for e in tied[1:]])
    solution = linprog(
        np.append(np.zeros(experts), 1.0),
        np.vstack(rows),
        np.concatenate(right),
        equal,
        np.zeros(len(equal)),
        bounds=[(None, None)] * (experts + 1),
    )
    return solution.fun if solution.status == 0 else np.inf


@given(seeds, st.integers(1, 4), st.integers(1, 4))
def test_distance_is_the_smallest_that_a_linear_programme_finds(seed, k, order):
    scores = dyadic_scores(seed, tokens=2, experts=5)
    distances = linf_distance(scores, k, order)
    for row, distance in zip(scores.numpy(), distances.tolist(), strict=True):
        assert distance == pytest.approx(programme(row, k, order), abs=1e-9)


@given(seeds, st.integers(1, 7))
def test_order_one_is_half_of_the_gap(seed, k):
    scores = dyadic_scores(seed)
    assert torch.equal(linf_distance(scores, k), gap(scores, k) / 2)


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda z: linf_distance(z, 3), "k=3"),
        (lambda z: linf_distance(z, 1, 3), "order=3"),
    ],
)
def test_bad_input_is_named(ask, names):
    with pytest.raises(ValueError, match=names):
        ask(torch.zeros(2, 3))
