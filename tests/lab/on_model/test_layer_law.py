"""The law in the layers of a model: D and S by brute force, and predictions that follow ε and σ."""

from functools import cache

import pytest
import torch

from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.smooth import SmoothingCalibration
from tieline.lab.limits import hard_sensitivity, projected_cost
from tieline.lab.on_model.layer_law import layer_laws, line_weights
from tieline.models import smooth_, unsmooth_
from tieline.run.forward import forward, only_running

IDS = batch(16, 64)
COARSE = "router bf16"
SCALES = (4.0, 16.0)


@cache
def model():
    return lively(tiny_model("mixtral"))


@cache
def calibration():
    return SmoothingCalibration.on_batches(model(), [IDS], COARSE)


@cache
def laws():
    with only_running(model()):
        return layer_laws(model(), calibration(), [IDS], [IDS[:8], IDS[8:]], scales=SCALES, draws=4)


def first_block(widths=None):
    """Output of the first routed block on the tokens, by the model's own code."""
    outputs = []
    block = model().model.layers[0].mlp
    handle = block.register_forward_hook(lambda _, __, output: outputs.append(output))
    if widths:
        smooth_(model(), epsilon=widths)
    with only_running(model()):
        forward(model(), IDS)
    handle.remove()
    if widths:
        unsmooth_(model())
    return (outputs[0] if isinstance(outputs[0], torch.Tensor) else outputs[0][0]).double()


@pytest.mark.parametrize(("density", "slope"), [(0.7, 0.0), (0.4, 1.5), (0.8, -0.9)])
def test_the_line_through_a_density_is_that_of_its_tokens(density, slope):
    width = 0.35
    gaps = torch.linspace(0, width, 100_001, dtype=torch.float64)
    of_gap = 2 * density * (1 + slope * gaps)  # twice that of the signed margin
    coefficients = torch.trapezoid(of_gap.unsqueeze(1) * line_weights(gaps, width), gaps, dim=0)
    assert coefficients.tolist() == pytest.approx([density, density * slope], abs=1e-6)


def test_moved_is_what_smoothing_changes_in_the_layer():
    law, plain = laws()[0], first_block()
    for point in law.points:
        smoothed = first_block(calibration().by_noise(point.scale))
        expected = (smoothed - plain).square().sum() / plain.square().sum()
        assert point.moved.value == pytest.approx(expected.item(), rel=1e-4)
        assert point.epsilon == point.scale * law.sigma


def test_wider_bands_move_more_and_are_less_sensitive():
    for law in laws():
        narrow, wide = law.points
        assert narrow.moved.value < wide.moved.value
        assert narrow.sensitivity.value > wide.sensitivity.value
        assert narrow.inside < wide.inside
        assert law.hard.value > narrow.sensitivity.value
        assert wide.factor == pytest.approx(law.hard.value / wide.sensitivity.value)


def test_predictions_are_those_of_the_limits_and_near_what_is_measured():
    for law in laws():
        tie = law.density, law.jump, law.sigma
        assert law.predicted_hard == pytest.approx(hard_sensitivity(*tie))
        for point in law.points:
            cost = projected_cost(*tie, point.epsilon, law.slope)
            assert point.predicted_moved == pytest.approx(cost.moved)
            assert point.predicted_sensitivity == pytest.approx(cost.sensitivity)
            assert 0.3 < point.predicted_moved / point.moved.value < 3
            assert 0.3 < point.over.value < 6
            assert point.over.standard_error > 0


def test_the_same_seed_gives_the_same_numbers_and_the_model_is_left_as_it_was():
    before = first_block()
    with only_running(model()):
        again = layer_laws(
            model(), calibration(), [IDS], [IDS[:8], IDS[8:]], scales=SCALES, draws=4
        )
    assert again == laws()
    assert torch.equal(first_block(), before)
