"""Layers measured on their own inputs, against counts by walking in small steps."""

import numpy as np
import pytest
import torch

from tieline.core.ranking import stable_topk
from tieline.lab.tropical.collapse import measure_router
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace


def routed(shift=0.0, tokens=60, experts=6, k=2, dim=5):
    random = torch.Generator().manual_seed(3)
    inputs = torch.randn(tokens, dim, generator=random) + shift
    weight = torch.randn(experts, dim, generator=random)
    ranked = stable_topk(inputs @ weight.T, experts)
    layer = LayerTrace("gate", LayerFacts(experts, k), ranked.indices, ranked.values, inputs=inputs)
    zeros = torch.zeros(tokens, dtype=torch.long)
    return RoutingTrace((layer,), zeros, zeros, torch.arange(tokens)), layer, weight


def test_switches_between_neighbours_are_those_of_small_steps():
    trace, layer, weight = routed()
    measurement = measure_router(trace, layer, weight)
    total, steps = 0, torch.linspace(0, 1, 4001)[:, None]
    for a, b in zip(layer.inputs[:-1], layer.inputs[1:], strict=True):
        chosen = stable_topk((a + steps * (b - a)) @ weight.T, 2).indices.sort(dim=1).values
        total += int((chosen[1:] != chosen[:-1]).any(dim=1).sum())
    assert measurement.neighbours.pairs == 59
    assert measurement.neighbours.switches.value * 59 == pytest.approx(total, abs=1)
    assert measurement.any_two.agreement == 1


def test_a_shift_of_the_inputs_saturates_and_centring_undoes_it():
    near = measure_router(*routed())
    trace, layer, weight = routed(shift=40.0)
    far = measure_router(trace, layer, weight)
    assert far.centring.as_is.relative > 3 * near.centring.as_is.relative
    assert far.centring.centred.relative == pytest.approx(near.centring.centred.relative, rel=1e-3)
    assert far.centring.as_is.offset > 10 * near.centring.as_is.offset
    assert far.ball == pytest.approx(1 / far.centring.as_is.offset, rel=1e-3)
    assert far.meets_tie < near.meets_tie
    assert np.isfinite(far.meets_tie)
