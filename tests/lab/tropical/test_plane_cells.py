"""Slices: exact polygons, checked by areas, by sampling and by exact counts."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tieline.core.errors import TielineError
from tieline.core.ranking import gap, stable_topk, topk_mask
from tieline.lab.tropical import (
    count_cells,
    count_regions,
    grid_of,
    pieces_along,
    pieces_on_patch,
    plane_through,
    slice_layer,
    slice_router,
)
from tieline.lab.tropical.plane_cells import polygon_area, split_by_lines
from tieline.trace import LayerFacts, LayerTrace

TRIANGLE = np.array([[0.0, 0.0], [1.0, 0.2], [0.3, 1.0]])


def random_layer(seed, n=6, width=2, dim=2):
    r = np.random.default_rng(seed)
    W, b = r.standard_normal((n, dim)), r.standard_normal(n)
    return W, b, r.standard_normal((n, width, dim)), r.standard_normal((n, width))


def inputs_of(points, at):
    plane = plane_through(points)
    return plane.origin + at @ plane.axes


@given(st.integers(0, 10_000), st.integers(1, 5))
@settings(max_examples=12, deadline=None)
def test_cells_tile_the_window_and_hold_their_coalition(seed, k):
    W, b, _, _ = random_layer(seed, dim=4)
    points = np.random.default_rng(seed + 1).standard_normal((3, 4))
    cut = slice_router(points, W, b, k, epsilon=0.2)
    areas = [polygon_area(np.array(cell.corners)) for cell in cut.cells]
    assert sum(areas) == pytest.approx(polygon_area(np.array(cut.window)), rel=1e-9)
    assert len({cell.coalition for cell in cut.cells}) == len(cut.cells)
    middles = np.array([np.mean(cell.corners, axis=0) for cell in cut.cells])
    scores = torch.from_numpy(inputs_of(points, middles) @ W.T + b)
    for cell, mask in zip(cut.cells, topk_mask(scores, k), strict=True):
        assert cell.coalition == tuple(mask.nonzero().squeeze(1).tolist())


@given(st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_bands_are_where_the_gap_is_small(seed):
    W, b, _, _ = random_layer(seed, dim=3)
    points, epsilon = np.random.default_rng(seed + 1).standard_normal((3, 3)), 0.3
    cut = slice_router(points, W, b, 2, epsilon=epsilon)
    corners = [np.array(cell.core) for cell in cut.cells if cell.core]
    if corners:
        at = inputs_of(points, np.concatenate(corners))
        assert gap(torch.from_numpy(at @ W.T + b), 2).min() >= epsilon - 1e-9
    low, high = np.array(cut.window)[[0, 2]]
    at = inputs_of(points, low + (high - low) * np.random.default_rng(0).random((4000, 2)))
    share = (gap(torch.from_numpy(at @ W.T + b), 2) < epsilon).double().mean().item()
    assert abs(share - cut.band_share) < 4 * np.sqrt(0.25 / 4000)


@pytest.mark.parametrize("seed", range(6))
def test_a_window_that_holds_everything_has_the_exact_counts(seed):
    W, b, V, c = random_layer(seed)
    wide = slice_router(TRIANGLE, W, b, 2, V=V, c=c, margin=200.0)
    assert len(wide.cells) == count_cells(W, b, 2)
    assert sum(cell.pieces for cell in wide.cells) == count_regions(W, b, V, c, 2)


def test_walls_and_kinks_lie_where_scores_tie_and_neurons_vanish():
    W, b, V, c = random_layer(3)
    cut = slice_router(TRIANGLE, W, b, 2, V=V, c=c, margin=2.0)
    walls = 0
    for cell in cut.cells:
        for at, tie in enumerate(cell.ties):
            if tie is not None:
                ends = [cell.corners[at], cell.corners[(at + 1) % len(cell.corners)]]
                scores = inputs_of(TRIANGLE, np.array(ends)) @ W.T + b
                np.testing.assert_allclose(scores[:, tie[0]], scores[:, tie[1]], atol=1e-9)
                assert tie[0] in cell.coalition
                assert tie[1] not in cell.coalition
                walls += 1
        for kink in cell.kinks:
            u = np.einsum("ehd,pd->peh", V, inputs_of(TRIANGLE, np.array(kink))) + c
            active = np.abs(u[:, list(cell.coalition)]).max(axis=0)
            assert active.min() < 1e-9
    assert walls % 2 == 0


def test_one_experts_support_is_a_union_of_cells_and_not_convex():
    W = np.array([[1.0, 0], [-0.5, 0.9], [-0.5, -0.9]])  # Example 4.6: three experts, two chosen
    cut = slice_router(TRIANGLE - TRIANGLE.mean(axis=0), W, None, 2, expert=0)
    assert cut.support is not None
    assert len(cut.support.cells) == 2
    assert cut.support.fill < 0.95
    support = slice_router(TRIANGLE - TRIANGLE.mean(axis=0), W, None, 1, expert=0).support
    assert support is not None
    assert support.fill == pytest.approx(1)
    assert len(support.outline) == 2


def test_slices_are_plain_data():
    W, b, V, c = random_layer(0)
    document = slice_router(TRIANGLE, W, b, 2, epsilon=0.1, V=V, c=c).to_dict()
    assert json.loads(json.dumps(document))["k"] == 2


def test_planes_keep_lengths():
    points = np.random.default_rng(0).standard_normal((3, 5))
    plane = plane_through(points)
    np.testing.assert_allclose(plane.axes @ plane.axes.T, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(plane.origin + plane.marks @ plane.axes, points, atol=1e-12)
    assert polygon_area(plane.window) > 0


def test_lines_cut_a_square_into_the_pieces_of_an_arrangement():
    square = np.array([[-1.0, -1], [1, -1], [1, 1], [-1, 1]])
    lines = np.array([[1.0, 0.1], [0.1, 1], [1, 1]]), np.array([0.0, 0.05, 0.2])
    pieces = split_by_lines(square, *lines)
    assert len(pieces) == 7
    assert sum(polygon_area(corners) for _, corners in pieces) == pytest.approx(4)
    assert len({signs for signs, _ in pieces}) == 7


def test_a_flat_patch_meets_the_cells_of_its_slice():
    W, b, V, c = random_layer(1, dim=3)
    surface = grid_of(lambda s, t: [4 * s - 2, 4 * t - 2, s + t], 4, 5)
    patch = pieces_on_patch(surface, W, b, 2, V, c)
    coarse_patch = pieces_on_patch(
        grid_of(lambda s, t: [4 * s - 2, 4 * t - 2, s + t], 2, 2), W, b, 2, V, c
    )
    assert (patch.coalitions, patch.pieces) == (coarse_patch.coalitions, coarse_patch.pieces)
    assert patch.area == pytest.approx(coarse_patch.area)
    assert (patch.triangles, coarse_patch.triangles) == (24, 2)
    rim = [surface[0, 0], surface[0, -1], surface[-1, -1]]
    assert pieces_along(rim, W, b, 2).coalitions <= patch.coalitions <= patch.pieces


def test_slices_of_a_captured_layer_go_through_its_inputs():
    r = np.random.default_rng(0)
    W, inputs = (
        torch.from_numpy(r.standard_normal((6, 4))),
        torch.from_numpy(r.standard_normal((9, 4))),
    )
    ranked = stable_topk(inputs @ W.T, 6)
    layer = LayerTrace(
        "gate", LayerFacts(6, 2), ranked.indices, ranked.values.float(), inputs=inputs.float()
    )
    cut = slice_layer(layer, W, (1, 4, 7), epsilon=0.1)
    direct = slice_router(inputs.float()[[1, 4, 7]], W, None, 2, epsilon=0.1)
    assert cut == direct
    with pytest.raises(TielineError, match="keeps no inputs"):
        slice_layer(LayerTrace("gate", LayerFacts(6, 2), ranked.indices), W, (0, 1, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plane_through([[0.0, 0], [1, 1], [2, 2]]), "on one line"),
        (lambda: plane_through([[0.0], [1], [2]]), "d >= 2"),
        (lambda: plane_through(np.eye(4)), "three points"),
        (lambda: slice_router(TRIANGLE, np.eye(3, 2), None, 1, epsilon=-1.0), "epsilon >= 0"),
        (
            lambda: slice_router(TRIANGLE, [[-1.0, 0], [-2, 0], [1, 0], [2, 0]], [1, 2, -1, -2], 2),
            "degenerate",
        ),
        (lambda: slice_router(TRIANGLE, np.eye(3, 2), [0, 0, -99.0], 1, expert=2), "nowhere"),
        (lambda: pieces_on_patch(np.eye(3), np.eye(3, 2), None, 1), "grid of points"),
        (lambda: grid_of(lambda s, t: [s, t], 1, 4), "rows, columns >= 2"),
    ],
)
def test_bad_slices_are_refused(call, message):
    with pytest.raises(TielineError, match=message):
        call()
