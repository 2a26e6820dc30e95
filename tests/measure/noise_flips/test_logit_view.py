"""How noise in the logits reaches the ranked scores, against finite differences and simulation."""

import pytest
import torch

from tests.measure.problems import SCORES, chosen_sets, layer_of, linear_router
from tieline.core.errors import TraceError
from tieline.measure.noise_flips import flip_probability, logit_view, scores_of_logits
from tieline.trace.record import LayerFacts, LayerTrace

UNITS = ("logits", "sigmoid", "sqrtsoftplus", "softmax")


def problem(units, biased, experts=8, k=3, tokens=400):
    _, _, logits = linear_router(tokens=tokens, experts=experts, dim=16)
    scale = {"logits": 0.5, "sigmoid": 0.1, "sqrtsoftplus": 0.1, "softmax": 0.03}[units]
    bias = scale * torch.randn(experts) if biased else None
    return logits, layer_of(logits, k, units, bias)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("biased", [False, True])
def test_the_order_of_the_view_is_the_order_of_the_choice(units, biased):
    logits, layer = problem(units, biased)
    view = logit_view(layer)
    assert (view.scores.diff(dim=1) <= 1e-6).all()
    assert torch.equal(view.scores, layer.scores.double()) == (biased or units == "logits")
    picked = logits.double().gather(1, layer.experts)
    if units == "softmax":
        assert view.logits is None
    else:
        assert torch.allclose(view.logits, picked, atol=2e-5)
    if units == "softmax" and not biased:  # known up to a shift per token
        assert (view.scores - picked).std(dim=1).max() < 1e-5


@pytest.mark.parametrize("units", ["logits", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("biased", [False, True])
def test_slope_is_the_derivative_of_what_is_ranked(units, biased):
    _, layer = problem(units, biased)
    view, step = logit_view(layer), 1e-4
    moved = scores_of_logits(view.logits + step, layer) - scores_of_logits(
        view.logits - step, layer
    )
    assert torch.allclose(moved / (2 * step), view.slope, rtol=1e-4)
    assert torch.allclose(scores_of_logits(view.logits, layer), view.scores, atol=1e-6)


@pytest.mark.parametrize("units", ["sigmoid", "softmax"])
def test_threshold_slope_is_that_of_the_selection_score(units):
    logits, layer = problem(units, biased=False)
    at = logits.double().gather(1, layer.experts)[:, 2]
    if units == "sigmoid":
        exact = at.sigmoid() * (1 - at.sigmoid())
    else:
        exact = logits.double().softmax(dim=1).gather(1, layer.experts)[:, 2]
    assert torch.allclose(logit_view(layer).threshold_slope, exact, rtol=1e-4)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("biased", [False, True])
def test_predicted_flips_are_those_of_noisy_logits(units, biased):
    logits, layer = problem(units, biased, tokens=600)
    view, sigma, repeats = logit_view(layer), 0.05, 150
    expected = flip_probability(view.scores, 3, view.slope * sigma)
    bias = 0 if layer.bias is None else layer.bias.double()
    clean = chosen_sets(SCORES[units](logits.double()) + bias, 3)
    flips = torch.zeros(len(logits), dtype=torch.float64)
    for _ in range(repeats):
        noisy = logits.double() + sigma * torch.randn(logits.shape, dtype=torch.float64)
        flips += (chosen_sets(SCORES[units](noisy) + bias, 3) != clean).any(dim=1)
    rate = flips.mean().item() / repeats
    assert rate == pytest.approx(expected.mean().item(), rel=0.04)


def test_saturated_and_missing_scores_stay_numbers():
    scores = torch.tensor([[1.0, 0.5, 0.0, -torch.inf]])
    for units in ("sigmoid", "sqrtsoftplus", "softmax"):
        for bias in (None, torch.zeros(4)):
            layer = LayerTrace(
                "x", LayerFacts(4, 1, units=units), torch.arange(4)[None], scores, bias=bias
            )
            view = logit_view(layer)
            assert not view.scores.isnan().any()
            assert not view.slope.isnan().any()
            assert view.scores[0, 3] == -torch.inf
            assert view.scores[0, :3].isfinite().all()


def test_ids_alone_have_no_view():
    layer = LayerTrace("x", LayerFacts(2, 1), torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(TraceError, match="ids only"):
        logit_view(layer)
