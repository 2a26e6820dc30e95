"""Exit samples: the law of the time, the face, and the order of the exit point."""

import math

import pytest
import torch

from tests.measure.cells import one_face, two_faces
from tests.measure.routers import inputs, router
from tieline.lab.geometry.exit_time import (
    exit_curve,
    exit_orders,
    face_exit,
    sample_exits,
    top_k_cell,
)

PATHS = 20_000


@pytest.mark.parametrize("steps", [1, 5])
def test_times_follow_the_law_within_the_steps_too(steps):
    exits = sample_exits(one_face(), 1.0, steps, PATHS, seed=6)
    for t in (0.1, 0.27, 0.5, 0.83, 1.0):
        exact = face_exit(torch.tensor(1.0), t).item()
        share = (exits.time <= t).double().mean().item()
        assert abs(share - exact) < 4 * math.sqrt(exact * (1 - exact) / PATHS)
    assert ((exits.face == -1) == (exits.time == math.inf)).all()


def test_the_nearer_of_two_orthogonal_faces_is_left_through_more_often():
    exits = sample_exits(two_faces(), 1.0, 16, PATHS, seed=7)
    # P(face 1 first, by time 1) = ∫ f_1(t) P(face 2 not hit by t) dt
    t = torch.linspace(0, 1, 20_001, dtype=torch.float64)[1:]
    hit, other = face_exit(torch.tensor(0.7), t), face_exit(torch.tensor(1.0), t)
    first = (hit.diff() * (1 - (other[1:] + other[:-1]) / 2)).sum().item() + hit[0].item()
    share = (exits.face == 0).double().mean().item()
    assert abs(share - first) < 4 * math.sqrt(first * (1 - first) / PATHS)


def test_exits_lie_on_their_face_and_agree_with_the_curve():
    weight, bias = router(8, 16, 3)
    cell = top_k_cell(weight @ inputs(1, 16)[0] + bias, 2, weight)
    exits = sample_exits(cell, 0.1, 16, PATHS, seed=8)
    left = exits.face >= 0
    pair = exits.scores[left].gather(1, cell.faces[exits.face[left]])
    assert (pair[:, 0] - pair[:, 1]).abs().max() < 1e-10
    assert exits.scores[~left].isnan().all()
    curve, share = exit_curve(cell, 0.1, 16, PATHS), left.double().mean().item()
    error = math.hypot(curve.stderr[-1].item(), math.sqrt(share * (1 - share) / PATHS))
    assert abs(curve.value[-1].item() - share) < 4 * error


def test_exit_points_are_of_order_one_but_for_a_share_that_vanishes_with_the_tolerance():
    weight, bias = router(8, 16, 3)
    cell = top_k_cell(weight @ inputs(1, 16)[0] + bias, 2, weight)
    exits = sample_exits(cell, 0.1, 16, PATHS, seed=9)
    shares = [
        (exit_orders(exits, epsilon) >= 2).double().mean().item() for epsilon in (0.2, 0.02, 0.002)
    ]
    assert (exit_orders(exits, 1e-9) == 1).all()
    assert shares[0] > shares[1] > shares[2] > 0
    assert shares[1] / shares[2] == pytest.approx(10, rel=0.4)


def test_the_place_on_the_face_is_that_of_the_motion_along_it():
    # along face 1 of two orthogonal ones the other coordinate is Brownian at the exit time
    cell = two_faces(r1=0.7, r2=50.0)
    exits = sample_exits(cell, 1.0, 2, PATHS, seed=10)
    left = exits.face == 0
    along = exits.scores[left, 0] - exits.scores[left, 2] - 50.0
    scaled = along / exits.time[left].sqrt()
    n = int(left.sum())
    assert abs(scaled.mean().item()) < 4 / math.sqrt(n)
    assert abs(scaled.var().item() - 1) < 4 * math.sqrt(2 / n)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="horizon=0"):
        sample_exits(one_face(), 0.0)
    with pytest.raises(ValueError, match="epsilon > 0"):
        exit_orders(sample_exits(one_face(), 1.0, 2, 100), 0.0)
