"""Brownian exits from a top-k cell against the exact laws of one and two faces."""

import math

import pytest
import torch

from tests.measure.cells import one_face, two_faces
from tests.measure.routers import inputs, router
from tieline.lab.geometry.exit_time import (
    exit_bounds,
    exit_curve,
    face_exit,
    normalised_distances,
    top_k_cell,
    two_face_exit,
)

PATHS = 200_000


def test_one_face_is_exact_with_any_number_of_steps():
    for steps in (1, 16):
        curve = exit_curve(one_face(), 1.0, steps, PATHS, seed=2)
        exact = face_exit(torch.tensor(1.0), curve.times)
        assert ((curve.value - exact).abs() <= 3 * curve.stderr).all()
        assert curve.stderr.max() <= 0.001
    assert curve.naive[-1].item() == pytest.approx(0.256, abs=0.004)


def test_two_orthogonal_faces_are_exact():
    curve = exit_curve(two_faces(), 1.0, 16, 240_000, seed=3)
    exact = [two_face_exit(0.7, 1.0, 0.0, t) for t in curve.times.tolist()]
    assert ((curve.value - torch.tensor(exact)).abs() <= 3 * curve.stderr).all()
    assert curve.stderr.max() <= 0.001
    assert curve.naive[-1] < curve.value[-1] - 0.05


@pytest.mark.parametrize("cosine", [0.5, -0.5])
def test_other_angles_have_a_small_bridge_error(cosine):
    curve = exit_curve(two_faces(cosine=cosine), 1.0, 16, 60_000, seed=4)
    exact = two_face_exit(0.7, 1.0, cosine, 1.0)
    assert abs(curve.value[-1].item() - exact) < 0.001 + 4 * curve.stderr[-1].item()


def test_a_cell_lies_between_the_bounds_of_the_theorem():
    weight, bias = router(8, 16, 1)
    x = inputs(4, 16)
    r = normalised_distances(x, weight, bias, 2, sigma=0.3)
    for row, distances in zip(x, r, strict=True):
        cell = top_k_cell(weight @ row + bias, 2, weight, sigma=0.3)
        assert torch.allclose(cell.distances.sort().values, distances.flatten().sort().values)
        curve = exit_curve(cell, 1.0, 16, 4000)
        bounds = exit_bounds(cell.distances, curve.times)
        error = 4 * curve.stderr + 8 / 4000  # an event of less than 1/paths may not be seen at all
        assert (bounds.lower - error <= curve.value).all()
        assert (curve.value <= bounds.upper + error).all()


def test_a_matrix_of_noise_turns_and_stretches_the_faces():
    weight, bias = router(5, 6, 2)
    sigma = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = inputs(3, 6)
    scores = x @ weight.T + bias
    distances = normalised_distances(x, weight, bias, 2, sigma)
    order = scores.sort(dim=1, descending=True).indices
    for t in range(3):
        i, j = order[t, 1], order[t, 2]
        length = (sigma.T @ (weight[i] - weight[j])).norm()
        assert distances[t, 1, 0].item() == pytest.approx(
            ((scores[t, i] - scores[t, j]) / length).item()
        )
    # moving the noise into the weight is the same problem
    cell = top_k_cell(scores[0], 2, weight, sigma)
    same = top_k_cell(scores[0], 2, weight @ sigma)
    assert torch.allclose(cell.distances, same.distances)
    gram = cell.normals @ cell.normals.T
    rows = (weight[cell.faces[:, 0]] - weight[cell.faces[:, 1]]) @ sigma
    rows = rows / rows.norm(dim=1, keepdim=True)
    assert torch.allclose(gram, rows @ rows.T)


def test_scale_and_time_go_together():
    weight, bias = router(5, 6, 2)
    scores = weight @ inputs(1, 6)[0] + bias
    slow = exit_curve(top_k_cell(scores, 2, weight, 0.5), 4.0, 8, 3000)
    fast = exit_curve(top_k_cell(scores, 2, weight, 1.0), 1.0, 8, 3000)
    assert torch.allclose(slow.value, fast.value)


def test_experts_that_are_alike_make_no_face_and_far_ones_do_not_matter():
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    cell = top_k_cell(torch.tensor([1.0, -5.0, 0.0], dtype=torch.float64), 1, weight)
    assert cell.faces.tolist() == [[0, 2]]
    far = torch.tensor([1.0, 0.0, -90.0], dtype=torch.float64)
    curve = exit_curve(top_k_cell(far, 1, torch.eye(3)), 1.0, 4, 1000)
    near = exit_curve(top_k_cell(far[:2], 1, torch.eye(3)[:2]), 1.0, 4, 1000)
    assert torch.allclose(curve.value, near.value)


def test_curves_rise_and_repeat_with_their_seed():
    curve = exit_curve(two_faces(), 1.0, 8, 5000, seed=1)
    assert (curve.value.diff() > 0).all()
    assert torch.equal(curve.value, exit_curve(two_faces(), 1.0, 8, 5000, seed=1).value)
    assert not torch.equal(curve.value, exit_curve(two_faces(), 1.0, 8, 5000, seed=2).value)
    assert curve.times.tolist() == pytest.approx([m / 8 for m in range(1, 9)])


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda z, w: top_k_cell(z, 0, w), "k=0"),
        (lambda z, w: top_k_cell(z, 3, w), "k=3"),
        (lambda z, w: top_k_cell(torch.zeros(3), 1, w), "boundary"),
        (lambda z, w: top_k_cell(z, 1, w, 0.0), "invertible, got 0"),
        (lambda z, w: top_k_cell(z, 1, w, torch.ones(3, 3)), "singular values"),
        (lambda z, w: exit_curve(top_k_cell(z, 1, w), -1.0), "horizon=-1"),
        (lambda z, w: exit_curve(top_k_cell(z, 1, w), math.inf), "horizon=inf"),
        (lambda z, w: exit_curve(top_k_cell(z, 1, w), 1.0, steps=0), "steps=0"),
    ],
)
def test_bad_input_is_named(ask, names):
    with pytest.raises(ValueError, match=names):
        ask(torch.tensor([2.0, 1.0, 0.0]), torch.eye(3))
