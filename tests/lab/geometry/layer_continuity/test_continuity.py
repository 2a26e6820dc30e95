"""Continuity of layers whose jumps are known."""

from pathlib import Path

import pytest
import torch

from tieline.core.errors import UnsupportedModelError
from tieline.lab.geometry import nearest_tie_point
from tieline.lab.geometry.layer_continuity import GATES, layer_inputs, measure_continuity
from tieline.lab.report.studies import continuity_figure
from tieline.report.matplotlib_figures import figure_bytes
from tieline.routing import CosineRouter, MoE, moe


@pytest.fixture(scope="module")
def measured_layer():
    torch.manual_seed(3)
    layer = moe(d_model=12, n_experts=8, k=3, d_hidden=6, activation="relu", bias=True)
    return layer, measure_continuity(layer, torch.randn(200, 12), name="layer 1", ties=20)


def test_the_hard_layer_jumps_and_the_smooth_ones_do_not(measured_layer):
    _, record = measured_layer
    assert tuple(record.gates) == GATES
    hard, steep, ramp = record.gates.values()
    assert abs(hard.exponent) < 0.01
    assert hard.largest[0] > 0.05
    assert hard.line.relative > 0.05
    assert abs(hard.line.at) < 1e-6  # the line is through the tie where it jumps most
    for smooth in (steep, ramp):
        assert smooth.exponent == pytest.approx(1, abs=0.02)
        assert smooth.largest[0] < 1e-6
        assert smooth.line.events > hard.line.events
        assert smooth.line.relative < 1e-5  # at no event of the whole line
    assert steep.slope > ramp.slope


def test_the_band_lets_half_an_expert_in(measured_layer):
    layer, record = measured_layer
    hard, steep, ramp = record.gates.values()
    assert hard.experts == 3
    assert steep.experts == ramp.experts == pytest.approx(3.5, abs=0.01)
    assert record.epsilon > 0
    assert record.ties == 20
    assert layer.router.weight.dtype == torch.float32  # measured on a copy


def test_the_jump_is_the_swap_of_the_two_tied_experts(measured_layer):
    """At a tie of experts i and j the output changes by w (f_i - f_j), w their common weight."""
    _, record = measured_layer
    torch.manual_seed(3)
    again = moe(d_model=12, n_experts=8, k=3, d_hidden=6, activation="relu", bias=True).double()
    inputs = torch.randn(200, 12)
    ties = nearest_tie_point(inputs[:20], again.router.weight.detach(), None, 3)
    with torch.no_grad():
        weights = again.gate(again.router(ties.point + 1e-12 * ties.normal))
        ones = torch.eye(8).double()
        i, j = ties.experts.T
        swap = again.experts(ties.point, ones[i]) - again.experts(ties.point, ones[j])
        shared = torch.maximum(weights.gather(1, i[:, None]), weights.gather(1, j[:, None]))
        jump = (shared * swap).norm(dim=1)
        size = again.experts(ties.point, again.gate(again.router(ties.point))).norm(dim=1).median()
    assert record.gates["hard"].largest[0] == pytest.approx((jump.max() / size).item(), rel=1e-6)
    assert record.gates["hard"].median[0] == pytest.approx((jump.median() / size).item(), rel=1e-6)


def test_inputs_of_every_layer_are_those_it_was_given():
    model = torch.nn.Sequential(
        moe(d_model=4, n_experts=3, k=1, d_hidden=2), moe(d_model=4, n_experts=3, k=1, d_hidden=2)
    )
    x = torch.randn(2, 5, 4)
    inputs = layer_inputs(model, input=x)
    torch.testing.assert_close(inputs["0"], x.flatten(0, 1))
    torch.testing.assert_close(inputs["1"], model[0](x).flatten(0, 1))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_other_routers_are_refused_by_name():
    linear = moe(d_model=4, n_experts=3, k=1, d_hidden=2)
    other = MoE(CosineRouter(4, 3), linear.gate, linear.experts)
    with pytest.raises(UnsupportedModelError, match=r"layer 7: .*CosineRouter with TopK"):
        measure_continuity(other, torch.randn(5, 4), name="layer 7")


def test_the_figure_is_the_same_twice(measured_layer):
    pytest.importorskip("matplotlib")
    layers, path = [measured_layer[1]] * 2, Path("a.png")
    first, again = (figure_bytes(lambda: continuity_figure(layers), path) for _ in range(2))
    assert first == again
    assert first.startswith(b"\x89PNG")
