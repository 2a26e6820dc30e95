"""Pieces along curves, against every crossing tried one by one."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tieline.core.errors import ShapeError, TielineError
from tieline.core.ranking import topk_mask
from tieline.lab.tropical import (
    capacity_bound,
    count_cells,
    count_regions,
    expected_kinks,
    expected_switches,
    paper_effective_bound,
    pieces_along,
    pieces_along_curve,
    spherical_length,
    wall_density,
)
from tieline.lab.tropical.affine import AffineRouter
from tieline.lab.tropical.curve_pieces import walk_coalitions


def random_layer(seed, n=5, width=2, dim=3):
    r = np.random.default_rng(seed)
    W, b = r.standard_normal((n, dim)), r.standard_normal(n)
    return W, b, r.standard_normal((n, width, dim)), r.standard_normal((n, width))


def formula(x, W, b, k, V, c):
    """Coalition at x and the signs of its experts' neurons."""
    chosen = topk_mask(torch.from_numpy(W @ x + b), k).numpy()
    return chosen.tobytes(), (V @ x + c > 0)[chosen].tobytes()


def brute_force(start, end, W, b, k, V, c):
    """Changes of coalition and of formula between all candidate places of a segment."""
    z, dz = W @ start + b, W @ (end - start)
    u, du = (V @ start + c).ravel(), (V @ (end - start)).ravel()
    positions = [(z[i] - z[j]) / (dz[j] - dz[i]) for i in range(len(z)) for j in range(i)]
    positions = [t for t in [*positions, *(-u / du)] if 0 < t < 1]
    ends = np.array([0.0, *sorted(positions), 1.0])
    met = [formula(start + t * (end - start), W, b, k, V, c) for t in (ends[1:] + ends[:-1]) / 2]
    switches = sum(p[0] != q[0] for p, q in pairwise(met))
    return (
        switches,
        sum(p != q for p, q in pairwise(met)),
        len({m[0] for m in met}),
    )


@given(st.integers(0, 10_000), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_segment_meets_what_trying_every_crossing_finds(seed, k):
    layer = random_layer(seed)
    start, end = 3 * np.random.default_rng(seed + 1).standard_normal((2, 3))
    pieces = pieces_along([start, end], *layer[:2], k, *layer[2:])
    switches, changes, coalitions = brute_force(start, end, *layer[:2], k, *layer[2:])
    # where a switch and a kink do not coincide, each is one change of formula
    assert (pieces.switches, pieces.coalitions) == (switches, coalitions)
    assert pieces.pieces == 1 + changes == 1 + pieces.switches + pieces.kinks


@given(st.integers(0, 10_000), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_walks_end_at_the_choice_of_their_end(seed, k):
    r = np.random.default_rng(seed)
    router = AffineRouter(r.standard_normal((6, 4)), r.standard_normal(6), k)
    a, b = r.standard_normal((2, 20, 4))
    walked = walk_coalitions(a, b, router)
    chosen = walked.first.copy()
    for segment, out, new in zip(walked.segment, walked.leaving, walked.entering, strict=True):
        assert chosen[segment, out]
        assert not chosen[segment, new]
        chosen[segment, out], chosen[segment, new] = False, True
    assert (chosen == topk_mask(torch.from_numpy(router.scores(b)), k).numpy()).all()
    for segment in range(20):
        shares = walked.share[walked.segment == segment]
        assert (np.diff(shares) >= 0).all()
        assert ((shares > 0) & (shares < 1)).all()
    assert walked.per_segment().sum() == len(walked.share)


def test_walks_in_chunks_are_the_walk(monkeypatch):
    r = np.random.default_rng(0)
    router = AffineRouter(r.standard_normal((6, 3)), r.standard_normal(6), 2)
    a, b = r.standard_normal((2, 11, 3))
    walk = walk_coalitions(a, b, router)
    monkeypatch.setattr("tieline.lab.tropical.curve_pieces.CHUNK", 36 * 4)
    for x, y in zip(walk, walk_coalitions(a, b, router), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("seed", range(5))
def test_a_long_line_meets_every_piece_of_dimension_one(seed):
    W, b, V, c = random_layer(seed, n=6, width=3, dim=1)
    pieces = pieces_along([[-1e4], [1e4]], W, b, 2, V, c)
    assert pieces.pieces == count_regions(W, b, V, c, 2)
    assert pieces.coalitions == 1 + pieces.switches == count_cells(W, b, 2)


def test_a_tie_at_the_start_is_no_switch():
    W, b = np.array([[1.0, 0], [0, 1.0]]), np.zeros(2)
    pieces = pieces_along([[1, 1], [0, 1], [0.5, 1]], W, b, 1)
    assert (pieces.switches, pieces.coalitions) == (0, 1)
    assert pieces_along([[1, 0], [0, 1], [1, 0]], W, b, 1).switches == 2


def test_revisited_coalitions_count_once():
    W, b = np.array([[1.0], [-1.0]]), np.zeros(2)
    pieces = pieces_along([[-1.0], [1.0], [-1.5]], W, b, 1)
    assert (pieces.switches, pieces.coalitions, pieces.pieces) == (2, 2, 3)


def test_crofton_holds_on_average_for_a_polyline():
    path = np.array([[1.0, 0, 0], [1, 1, 0], [-1, 2, 1], [0.5, 0, 3]])
    length, n, k = spherical_length(path), 8, 3
    counts = [
        pieces_along(path, np.random.default_rng(s).standard_normal((n, 3)), None, k).switches
        for s in range(300)
    ]
    error = np.std(counts, ddof=1) / math.sqrt(300)
    assert abs(np.mean(counts) - expected_switches(n, k, length)) < 3 * error
    pieces = pieces_along(path, np.eye(8, 3), None, k)
    assert pieces.spherical_length == length
    assert pieces.expected_switches == expected_switches(n, k, length)


def test_crofton_holds_with_biases_and_kinks():
    path, n, k, width = np.array([[0.0, 0], [1, 1], [3, -1]]), 6, 2, 3
    length = spherical_length(path, lift=1.0)
    curves = [
        pieces_along(path, *L[:2], k, *L[2:])
        for L in (random_layer(s, n, width, 2) for s in range(300))
    ]
    for counts, expected in (
        ([f.switches for f in curves], expected_switches(n, k, length)),
        ([f.kinks for f in curves], expected_kinks(k, width, length)),
    ):
        assert abs(np.mean(counts) - expected) < 3 * np.std(counts, ddof=1) / math.sqrt(300)


def test_a_callable_circle_meets_every_cone_of_the_plane():
    W = np.random.default_rng(4).standard_normal((7, 2))
    turn = 2 * math.pi
    pieces = pieces_along_curve(lambda t: [math.cos(turn * t), math.sin(turn * t)], W, None, 3)
    assert pieces.status == "ok"
    assert pieces.switches == pieces.coalitions == count_cells(W, np.zeros(7), 3)
    assert pieces.spherical_length == pytest.approx(turn, rel=1e-12)
    assert pieces.expected_switches == pytest.approx(2 * wall_density(7, 3))


def test_a_curve_that_does_not_settle_says_so():
    pieces = pieces_along_curve(
        lambda t: [t + 1, math.sin(40 * t)], np.array([[0, 1.0], [0, -1]]), None, 1, start=2, most=4
    )
    assert "not settled" in pieces.status


def test_the_papers_bound_has_a_meaning_on_the_whole_sphere_only():
    area = 4 * math.pi
    assert paper_effective_bound(8, 2, 3, 2, 3, area) == pytest.approx(capacity_bound(8, 2, 3, 2))


def test_lengths_of_small_steps_are_not_lost():
    assert spherical_length([[1.0, 0], [1.0, 1e-12]]) == pytest.approx(1e-12, rel=1e-9)
    assert spherical_length([[1.0, 0], [-1.0, 0]]) == pytest.approx(math.pi)
    assert spherical_length([[0.0], [1.0]], lift=1.0) == pytest.approx(math.pi / 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pieces_along([[0.0, 1], [0, 1]], np.eye(3, 2), None, 1), "points 0 and 1"),
        (lambda: pieces_along([[0.0, 1]], np.eye(3, 2), None, 1), "at least 2 points"),
        (lambda: pieces_along(np.eye(3), np.eye(3, 2), None, 1), "R\\^2"),
        (lambda: pieces_along(np.eye(2), np.eye(3, 2), None, 4), "1 <= k <= N"),
        (lambda: pieces_along(np.eye(2), [[np.nan, 1], [0, 1]], None, 1), "finite"),
        (lambda: pieces_along(np.eye(2), np.eye(3, 2), np.zeros(2), 1), "3 rows of weight"),
        (lambda: pieces_along(np.eye(2), np.eye(3, 2), None, 1, np.zeros((2, 1, 2))), "need V"),
        (lambda: spherical_length([[0.0, 0], [1, 1]]), "meets the origin"),
        (lambda: expected_switches(4, 2, -1.0), "length >= 0"),
        (lambda: paper_effective_bound(4, 2, 1, 4, 3, 1.0), "d_eff <= d"),
    ],
)
def test_bad_curves_are_refused(call, message):
    with pytest.raises(TielineError, match=message):
        call()


def test_torch_and_numpy_are_alike():
    W, b, _, c = random_layer(0)
    path = np.random.default_rng(1).standard_normal((4, 3))
    tensors = map(torch.from_numpy, (path, W, b))
    assert pieces_along(*tensors, 2) == pieces_along(path, W, b, 2)
    with pytest.raises(ShapeError, match="no weight"):
        pieces_along(path, W, b, 2, None, c)
