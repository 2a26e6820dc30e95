"""A head as a regression function: attention itself, autograd, and the mixture of the same row."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.attention.softmax_and_sigmoid import sigmoid_attention, softmax_attention
from tieline.lab.estimation.attention_heads import AttentionHead

ATTENTION = {"softmax": softmax_attention, "sigmoid": sigmoid_attention}
HEADS = [AttentionHead(kind, 4, 3, row) for kind in ATTENTION for row in (0, 2)]


def drawn(head, problems=2, n=6):
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(problems, head.size, dtype=torch.float64, generator=generator)
    x = torch.randn(problems, n, head.tokens * head.dim, dtype=torch.float64, generator=generator)
    return theta, x


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_the_value_is_the_row_of_attention(head):
    theta, x = drawn(head)
    for index in range(2):
        bilinear, value = head.split(theta[index])
        tokens = x[index].unflatten(1, (head.tokens, head.dim))
        expected = ATTENTION[head.kind](
            tokens @ bilinear, tokens, tokens @ value[:, None], scale=1.0
        )
        output = head.value(theta, x)[index]
        assert torch.allclose(output, expected[:, head.row, 0], atol=1e-13)


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_the_jacobian_is_that_of_autograd(head):
    theta, x = drawn(head)
    value, jacobian = head.value_and_jacobian(theta, x)
    assert torch.equal(value, head.value(theta, x))
    for index in range(2):
        expected = torch.autograd.functional.jacobian(
            lambda vector, index=index: head.value(vector[None], x[index : index + 1])[0],
            theta[index],
        )
        assert torch.allclose(jacobian[index], expected, atol=1e-13)


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_the_mixture_of_the_head_is_the_head(head):
    theta, x = drawn(head)
    output = head.mixture().regression(head.as_mixture(theta[0]), x[0])
    assert torch.allclose(output, head.value(theta[:1], x[:1])[0], atol=1e-12)


def test_what_is_no_head_is_refused(no_axis_checks):
    with pytest.raises(TielineError, match="kind must be one of"):
        AttentionHead("relu", 3, 2)
    with pytest.raises(TielineError, match="a row among them"):
        AttentionHead("softmax", 3, 2, row=3)
    with pytest.raises(TielineError, match="6 numbers, got 5"):
        AttentionHead("softmax", 3, 2).split(torch.zeros(5))
