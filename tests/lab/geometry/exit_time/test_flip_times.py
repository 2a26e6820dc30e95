"""Flip times of tokens, from scores and from a recorded layer."""

import pytest
import torch

from tests.measure.problems import layer_of
from tests.measure.routers import inputs, router
from tieline.lab.geometry.exit_time import face_exit, score_flip_times, trace_flip_times
from tieline.lab.geometry.ties import distance_to_tie


def test_tokens_flip_between_their_bounds_and_near_ones_first():
    weight, bias = router(8, 12, 1)
    x = inputs(12, 12)
    flip_times = score_flip_times(x @ weight.T + bias, 2, weight, 1.0, sigma=0.2, paths=3000)
    error = 4 * flip_times.stderr + 8 / 3000  # an event rarer than 1/paths may not occur
    assert (flip_times.lower <= flip_times.value + error).all()
    assert (flip_times.value <= flip_times.upper + error).all()
    assert torch.allclose(flip_times.nearest * 0.2, distance_to_tie(x, weight, bias, 2))
    half = face_exit(flip_times.nearest, flip_times.median_bound())
    assert torch.allclose(half, torch.full_like(half, 0.5))
    assert flip_times.value[flip_times.nearest.argmin(), 0] == flip_times.value[:, 0].max()


def test_a_trace_gives_the_same_tokens_without_its_ties():
    weight = router(6, 8, 2)[0]
    logits = (inputs(10, 8) @ weight.T).float()
    logits[3, :] = 0.0
    flip_times = trace_flip_times(layer_of(logits, 2), weight, 0.5, tokens=6, paths=200)
    untied = logits[[0, 1, 2, 4, 5, 6]].double()
    exact = score_flip_times(untied, 2, weight, 0.5, paths=200)
    assert torch.equal(flip_times.value, exact.value)
    assert flip_times.paths == 200


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        ({"affine": False}, "affine"),
        ({"ranks": 4}, "keeps 4"),
        ({"n_groups": 2, "k_groups": 1}, "2 groups"),
    ],
)
def test_layers_without_flat_faces_are_refused(facts, names):
    weight = router(6, 8, 2)[0]
    layer = layer_of((inputs(4, 8) @ weight.T).float(), 2, **facts)
    with pytest.raises(ValueError, match=names):
        trace_flip_times(layer, weight, 0.5)
