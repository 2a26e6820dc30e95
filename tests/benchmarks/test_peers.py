"""Both sides of a comparison with a peer do the same job, on small inputs."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def peers():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield import_module("peers")


@torch.inference_mode()
def test_hooks_and_capture_record_the_same_routes(peers):
    model = import_module("capture").olmoe(2, 16, 8)
    ids = torch.arange(1, 65).view(2, 32)
    scores, experts = peers.captured_routes(model, ids)
    hooked_scores, hooked_experts = peers.hooked_routes(model, ids)
    assert torch.equal(scores, hooked_scores)
    assert torch.equal(experts.long(), hooked_experts)
    assert scores.shape == (2, 64, 9)


def test_loop_and_check_count_the_same_faults(peers):
    faulty, lost, experts = peers.faulty_routes(tokens=5000, layers=10)
    loop, ours = (count(faulty, experts) for count in (peers.looped_faults, peers.checked_faults))
    expected = {"zeros-inside": 40, "twice": 500, "outside": 10, "constant": 1, "copies": 400}
    assert loop | expected == loop
    assert ours | expected == ours
    loop, ours = (count(lost, experts) for count in (peers.looped_faults, peers.checked_faults))
    assert loop == ours
    assert loop["dead"] == 16


def test_the_loop_of_fits_predicts_a_planted_mixture(peers):
    x, y = peers.regression_table(800)
    fit = peers.LoopedMixture(starts=1, most_steps=20).fit(x[:600], y[:600])
    error = np.mean((fit.predict(x[600:]) - y[600:]) ** 2)
    assert error < 0.5 * y[600:].var()
