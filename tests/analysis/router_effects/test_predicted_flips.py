"""The noise that flips a share of tokens, where the answer is known."""

import math

import pytest
import torch

from tieline.analysis.router_effects import sigma_for_flips
from tieline.core.numerics import solve_increasing
from tieline.trace.record import LayerFacts, LayerTrace


def test_an_increasing_function_is_inverted_from_any_start():
    for start in (1e-5, 0.01, 1e3):
        assert solve_increasing(lambda x: x * x, 4.0, start) == pytest.approx(2.0, rel=1e-3)
    assert solve_increasing(lambda x: 0.0, 0.01) is None
    assert solve_increasing(lambda x: 1.0, 0.01) is None


def test_two_experts_flip_as_the_normal_law_says():
    """P(flip) = Φ(-Δ / √2σ) for a single gap Δ."""
    gap, share = 0.3, 0.01
    scores = torch.tensor([[gap, 0.0]]).repeat(5, 1)
    layer = LayerTrace("a", LayerFacts(2, 1), torch.tensor([[0, 1]]).repeat(5, 1), scores)
    sigma = sigma_for_flips({"a": [layer], "b": [layer]}, share)
    exact = gap / (math.sqrt(2) * -torch.special.ndtri(torch.tensor(share)).item())
    assert sigma.model == pytest.approx(exact, rel=2e-3)
    assert sigma.layers == {
        "a": pytest.approx(exact, rel=2e-3),
        "b": pytest.approx(exact, rel=2e-3),
    }
