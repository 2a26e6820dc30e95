"""Distances of predicted distributions, and losses of the next token."""

import math

import pytest
import torch
from hypothesis import given

from tests.strategies import seeds
from tieline.core import predictions
from tieline.core.predictions import (
    ComparedPredictions,
    k3_divergence,
    kl_divergence,
    next_token_losses,
)


def test_divergence_is_the_kl_and_never_negative():
    clean, other = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    p, q = clean.double().softmax(-1), other.double().softmax(-1)
    assert torch.allclose(kl_divergence(clean, other), (p * (p / q).log()).sum(-1))
    assert (kl_divergence(clean, clean + 7) < 1e-12).all()
    assert (kl_divergence(clean, clean) == 0).all()


@pytest.mark.parametrize("most", [0, predictions.MOST_KEPT])
def test_predictions_compared_with_several_have_the_same_divergences(monkeypatch, most):
    monkeypatch.setattr(predictions, "MOST_KEPT", most)
    clean, *others = torch.randn(4, 3, 5, 700)
    compared = ComparedPredictions(clean)
    for other in (*others, clean):
        assert torch.equal(compared.divergence(other), kl_divergence(clean, other))


def test_distributions_that_several_are_compared_with_are_computed_once(monkeypatch):
    calls, computed = [], predictions._distributions
    monkeypatch.setattr(predictions, "_distributions", lambda x: calls.append(x) or computed(x))
    clean, *others = torch.randn(4, 3, 5, 700)
    compared = ComparedPredictions(clean)
    for other in others:
        compared.divergence(other)
    assert sum(len(x) for x in calls) == 3 * 5


def test_losses_are_those_of_the_next_token():
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 2] = math.log(5)
    ids = torch.tensor([[0, 2, 3]])
    assert next_token_losses(logits, ids).tolist() == [
        [pytest.approx(-math.log(5 / 8)), pytest.approx(math.log(4))]
    ]


@given(seeds)
def test_the_mean_of_k3_is_the_kl(seed):
    generator = torch.Generator().manual_seed(seed)
    clean, other = torch.randn(2, 1, 4, 5, generator=generator)
    p, q = (logits.double().log_softmax(-1) for logits in (clean, other))
    terms = k3_divergence(p, q)
    assert (terms >= 0).all()
    assert torch.allclose((p.exp() * terms).sum(-1), kl_divergence(clean, other))


def test_losses_do_not_depend_on_the_other_rows():
    logits, ids = torch.randn(3, 6, 7), torch.randint(0, 7, (3, 6))
    alone = [next_token_losses(logits[i : i + 1], ids[i : i + 1]) for i in range(3)]
    assert torch.equal(torch.cat(alone), next_token_losses(logits, ids))
