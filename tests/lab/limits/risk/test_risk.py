"""Sampled risks against loops over the definition, and their chain of bounds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.limits.problems import sample, within
from tests.strategies import score_matrices
from tieline.core.errors import ParameterError, ShapeError, TielineError
from tieline.lab.limits import (
    MoESample,
    evaluate,
    hard_predictions,
    hard_risk,
    risk_curve,
    risk_gap,
    soft_predictions,
    soft_risk,
    winner_odds,
)
from tieline.routing import LinearRouter


def with_outputs(scores):
    outputs = torch.arange(scores.numel()).double().reshape(scores.shape) % 7 - 3
    return MoESample(scores, outputs, outputs[:, 0] / 2)


many = score_matrices().filter(lambda s: len(s) > 1)


@given(many, st.sampled_from([0.2, 1.0, 5.0]))
def test_predictions_match_their_definitions(scores, tau):
    drawn = with_outputs(scores)
    soft, hard = soft_predictions(drawn, tau), hard_predictions(drawn)
    for i, row in enumerate(scores.tolist()):
        out = drawn.outputs[i].tolist()
        odds = [math.exp((a - max(row)) / tau) for a in row]
        mixed = sum(w * f for w, f in zip(odds, out, strict=True)) / sum(odds)
        assert soft[i].item() == pytest.approx(mixed, abs=1e-12)
        assert hard[i].item() == out[row.index(max(row))]


@given(many, st.sampled_from([0.2, 1.0]))
def test_the_gap_is_the_difference_of_the_risks(scores, tau):
    drawn = with_outputs(scores)
    difference = soft_risk(drawn, tau).value - hard_risk(drawn).value
    assert risk_gap(drawn, tau).value == pytest.approx(difference, abs=1e-12)


@given(many, st.integers(-5, 5))
def test_risks_ignore_a_common_shift_of_scores_and_relabelling(scores, shift):
    drawn = with_outputs(scores)
    order = torch.arange(scores.shape[1]).flip(0)
    other = MoESample(scores[:, order] + shift, drawn.outputs[:, order], drawn.target)
    assert soft_risk(other, 0.5).value == pytest.approx(soft_risk(drawn, 0.5).value, abs=1e-12)


def test_odds_are_exact_where_the_weight_rounds_to_one():
    drawn = MoESample(
        torch.tensor([[50.0, 0.0, 0.0]] * 2).double(),
        torch.zeros(2, 3).double(),
        torch.zeros(2).double(),
    )
    assert winner_odds(drawn, 1.0)[0].item() == pytest.approx(math.log(2) - 50, rel=1e-14)


def test_a_module_router_and_the_curve_of_temperatures():
    torch.manual_seed(1)
    router, x = LinearRouter(3, 4), torch.randn(50, 3)
    drawn = evaluate(router, lambda x: x @ torch.ones(3, 4), lambda x: x[:, 0], x)
    curve = risk_curve(drawn, [0.1, 1.0])
    assert curve.taus == (0.1, 1.0)
    assert curve.soft[1] == soft_risk(drawn, 1.0)
    assert curve.gaps[0] == risk_gap(drawn, 0.1)
    assert curve.hard == hard_risk(drawn)


def test_paired_errors_are_those_of_the_layer():
    drawn = sample(n=20_000)
    assert risk_gap(drawn, 0.01).stderr < 0.1 * hard_risk(drawn).stderr
    assert within(risk_gap(drawn, 0.01), risk_gap(sample(n=400_000, seed=5), 0.01).value, 5)


def test_bad_samples_and_temperatures_are_refused():
    with pytest.raises(ParameterError, match="tau=0"):
        soft_risk(sample(n=10), 0.0)
    with pytest.raises(ShapeError, match="got 3 and 1"):
        MoESample(torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(TielineError, match="outputs must be finite, got 1"):
        MoESample(
            torch.zeros(2, 2), torch.tensor([[0.0, math.nan]] * 1 + [[0.0, 0.0]]), torch.zeros(2)
        )
