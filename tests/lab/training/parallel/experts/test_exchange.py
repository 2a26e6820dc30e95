"""Experts on two ranks are the function, and have the gradients, of experts on one: exactly.

All numbers are small integers in float64, so that sums are exact in any order and equality is
demanded, not closeness.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.training.parallel.tasks import (
    evaluate_experts,
    integer_experts,
    integers,
    spread_experts,
)

WIDTH = 3


def weights_of(kind, tokens, experts):
    """Weights with zeros of each kind: any number per token, all in one rank, nobody."""
    weights = integers(tokens, experts, low=0, high=3, seed=7)
    if kind == "first rank":
        weights[:, -(-experts // 2) :] = 0
    if kind == "last expert":
        weights[:, :-1] = 0
    return weights * (kind != "nobody")


@pytest.mark.parametrize("kind", ["any", "first rank", "last expert", "nobody"])
@pytest.mark.parametrize("bias", [False, True])
@settings(max_examples=6)
@given(tokens=st.lists(st.integers(0, 4), min_size=2, max_size=2), experts=st.integers(1, 5))
def test_spread_experts_are_the_experts(pair, kind, bias, tokens, experts):
    x, weights = integers(sum(tokens), WIDTH, seed=5), weights_of(kind, sum(tokens), experts)
    y, *grads, parameters = evaluate_experts(integer_experts(experts, bias), x, weights)
    ranks = pair.run(spread_experts, experts, bias, x, weights, tokens)
    assert torch.equal(torch.cat([rank[0] for rank in ranks]), y)
    for place, grad in enumerate(grads):
        assert torch.equal(torch.cat([rank[1 + place] for rank in ranks]), grad)
    for *_, found in ranks:
        assert found.keys() == parameters.keys()
        assert all(torch.equal(found[name], parameters[name]) for name in parameters)


def test_the_output_of_a_token_does_not_depend_on_the_others(pair):
    x, weights = integers(6, WIDTH, seed=1), weights_of("any", 6, 4)
    together = pair.run(spread_experts, 4, True, x, weights, [3, 3])
    alone = pair.run(spread_experts, 4, True, x[2:3], weights[2:3], [1, 0])
    assert torch.equal(together[0][0][2:], alone[0][0])
