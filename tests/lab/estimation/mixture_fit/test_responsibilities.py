"""Expectation-maximisation: the likelihood grows, and regions that overlap in x are separated."""

import torch

from tests.lab.estimation.tables import piecewise
from tieline.lab.estimation.mixture_fit import responsibilities


def likelihood(x, y, mixture):
    design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    squares = (y - design @ mixture.experts).square().sum(dim=2).mT
    logs = (design @ mixture.gate).log_softmax(dim=1) - squares / (2 * mixture.variance)
    return (logs.logsumexp(dim=1) - 0.5 * y.shape[1] * torch.tensor(mixture.variance).log()).mean()


def start(x, experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(x.shape[1], experts, dtype=torch.float64, generator=generator)
    return (x @ directions).softmax(dim=1)


def test_the_likelihood_does_not_fall():
    x, y, _ = piecewise(400, 3, 3, 0.2)
    x, y = torch.tensor(x), torch.tensor(y)[:, None] / y.std()
    values = [
        likelihood(x, y, responsibilities(x, y, torch.ones(400).double(), start(x, 3),
                                          iterations=steps))
        for steps in (1, 2, 4, 8, 16, 32, 64)
    ]  # fmt: skip
    rises = torch.stack(values).diff()
    assert rises.min() > -1e-3  # the small ridge is not part of the likelihood
    assert rises.sum() > 0.5


def test_regions_are_found_by_what_their_experts_predict():
    x, y, exact = piecewise(3000, 4, 3, 0.05)
    scale = y.std()
    x, y = torch.tensor(x), torch.tensor(y)[:, None] / scale
    weight = torch.ones(3000).double()
    tries = [responsibilities(x, y, weight, start(x, 3, seed)) for seed in range(4)]
    mixture = min(tries, key=lambda attempt: attempt.variance)  # a start may end in a local maximum
    assert torch.allclose(mixture.share.sum(dim=1), torch.ones(3000).double())
    assert mixture.variance < 1.3 * (0.05 / scale) ** 2
    design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    chosen = mixture.share.argmax(dim=1)
    predicted = (design * mixture.experts[chosen, :, 0]).sum(dim=1)
    assert (predicted - torch.tensor(exact) / scale).abs().median() < 0.01


def test_weights_are_repetitions():
    x, y, _ = piecewise(80, 2, 2, 0.3, outputs=2)
    x, y = torch.tensor(x), torch.tensor(y)
    weight = torch.randint(1, 4, (80,), generator=torch.Generator().manual_seed(0)).double()
    copies = torch.arange(80).repeat_interleave(weight.long())
    first = start(x, 2)
    weighted = responsibilities(x, y, weight, first)
    repeated = responsibilities(
        x[copies], y[copies], torch.ones(len(copies)).double(), first[copies]
    )
    assert torch.allclose(weighted.experts, repeated.experts, atol=1e-9)
    assert torch.allclose(weighted.share[copies], repeated.share, atol=1e-9)
