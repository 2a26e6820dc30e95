"""A row of attention and its mixture of experts are the same function."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import seeds
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.attention.head_mixture import attention_as_moe
from tieline.lab.attention.softmax_and_sigmoid import (
    HeadWeights,
    SelfAttention,
    sigmoid_attention,
    softmax_attention,
)
from tieline.routing import Sigmoid, Softmax

EXACT = {"rtol": 0, "atol": 1e-10}


def drawn(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def attention_row(x, maps, biases, *, row, kind, bias=None, **options):
    q, k, v = (x @ w + (0 if b is None else b) for w, b in zip(maps, biases, strict=True))
    if kind == "softmax":
        return softmax_attention(q, k, v, **options)[row]
    return sigmoid_attention(q, k, v, bias=bias, **options)[row]


@st.composite
def heads(draw):
    """A sequence, a head with or without biases, a row and the options of the attention."""
    tokens, width, d_key, d_value = (draw(st.integers(1, n)) for n in (6, 5, 7, 4))
    shapes = [(tokens, width), (width, d_key), (width, d_key), (width, d_value)]
    x, *maps = drawn(draw(seeds), *shapes, (d_key,), (d_key,), (d_value,))
    maps, biases = maps[:3], [draw(st.sampled_from([b, None])) for b in maps[3:]]
    kind = draw(st.sampled_from(["softmax", "sigmoid"]))
    options = {
        "row": draw(st.integers(0, tokens - 1)),
        "kind": kind,
        "causal": draw(st.booleans()),
        "scale": draw(st.none() | st.floats(-2, 2)),
        "bias": draw(st.sampled_from([None, "-log n", 0.7])) if kind == "sigmoid" else None,
    }
    return x, maps, biases, options


def mixture(x, maps, biases, options):
    return attention_as_moe(x, HeadWeights(*maps, *biases), **options)


@given(heads())
def test_the_output_is_the_attention_row(head):
    x, maps, biases, options = head
    moe = mixture(x, maps, biases, options)
    torch.testing.assert_close(moe.output, attention_row(x, maps, biases, **options), **EXACT)


@given(heads(), seeds)
def test_it_is_the_same_function_of_every_other_sequence(head, seed):
    x, maps, biases, options = head
    moe = mixture(x, maps, biases, options)
    (others,) = drawn(seed, (3, *x.shape))
    expected = torch.stack([attention_row(o, maps, biases, **options) for o in others])
    torch.testing.assert_close(moe(others.flatten(1)), expected, **EXACT)


@given(heads())
def test_scores_are_quadratic_and_experts_linear_in_the_sequence(head):
    x, maps, biases, options = head
    moe = mixture(x, maps, biases, options)
    X, A, b, c = x.flatten(), moe.router.matrices, moe.router.linear, moe.router.constant
    assert torch.equal(A, A.mT)
    torch.testing.assert_close((X @ A) @ X + b @ X + c, moe.scores, **EXACT)
    values = X @ moe.experts.maps + moe.experts.constant
    torch.testing.assert_close(moe.weights @ values, moe.output, **EXACT)
    assert len(moe.scores) == (options["row"] + 1 if options["causal"] else len(x))


def test_matrices_are_those_of_the_paper():
    x, w_q, w_k, w_v = drawn(0, (3, 2), (2, 4), (2, 4), (2, 5))
    moe = attention_as_moe(x, HeadWeights(w_q, w_k, w_v), row=1, kind="sigmoid", bias=0.25)
    B = w_q @ w_k.T / math.sqrt(4)
    for j in range(3):
        M, P = torch.zeros(6, 6, dtype=torch.float64), torch.zeros(6, 5, dtype=torch.float64)
        M[2:4, 2 * j : 2 * j + 2] = B  # E_i B E_jᵀ
        P[2 * j : 2 * j + 2] = w_v  # E_j W_V
        torch.testing.assert_close(moe.router.matrices[j], (M + M.T) / 2, **EXACT)
        torch.testing.assert_close(moe.experts.maps[j], P, **EXACT)
    assert not moe.router.linear.any()
    assert torch.equal(moe.router.constant, torch.full((3,), 0.25, dtype=torch.float64))


def test_gates_are_those_of_the_layer():
    x, w_q, w_k, w_v = drawn(0, (3, 2), (2, 4), (2, 4), (2, 5))
    gates = {"softmax": Softmax, "sigmoid": Sigmoid}
    for kind, gate in gates.items():
        moe = attention_as_moe(x, HeadWeights(w_q, w_k, w_v), row=0, kind=kind)
        assert type(moe.gate) is gate
        assert torch.equal(moe.weights, moe.gate(moe.scores))
    assert torch.equal(moe.sequence, x.flatten())


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_heads_of_a_layer_add_up_to_its_row(kind):
    bias = "-log n" if kind == "sigmoid" else None
    layer = SelfAttention(6, 2, kind=kind, causal=True, bias=bias, projection_bias=True).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    rows = [
        attention_as_moe(x, layer.head(h), row=3, kind=kind, causal=True, bias=bias).output
        for h in range(2)
    ]
    torch.testing.assert_close(layer.out(torch.cat(rows)), layer(x)[3], **EXACT)


def test_a_view_draws_no_random_numbers_and_carries_no_gradient():
    layer = SelfAttention(4, 2)
    x = torch.randn(3, 4)
    state = torch.get_rng_state()
    moe = attention_as_moe(x, layer.head(0), row=0, kind="softmax")
    assert torch.equal(torch.get_rng_state(), state)
    assert not moe.output.requires_grad
    assert moe.output.dtype == torch.float32


SHAPES = [(3, 2), (2, 4), (2, 4), (2, 5)]


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_that_is_not_there_is_refused(row):
    x, *maps = drawn(0, *SHAPES)
    with pytest.raises(ShapeError, match=f"0 <= row < 3 tokens, got row={row}"):
        attention_as_moe(x, HeadWeights(*maps), row=row, kind="softmax")


@pytest.mark.parametrize(
    ("shapes", "rule"),
    [
        ([(3, 2), (3, 4), (2, 4), (2, 5)], "D rows"),
        ([(3, 2), (2, 4), (2, 4), (3, 5)], "D rows"),
        ([(3, 2), (2, 4), (2, 3), (2, 5)], "one dimension"),
        ([(3, 2), (2, 0), (2, 0), (2, 5)], "one dimension"),
    ],
)
def test_maps_that_do_not_fit_are_refused(shapes, rule):
    x, *maps = drawn(0, *shapes)
    with pytest.raises(ShapeError, match=rule):
        attention_as_moe(x, HeadWeights(*maps), row=0, kind="softmax")


def test_other_misfits_are_refused():
    x, *maps = drawn(0, *SHAPES)
    head, wide = HeadWeights(*maps), torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ShapeError, match="as wide as its map"):
        attention_as_moe(x, head._replace(b_q=wide), row=0, kind="softmax")
    with pytest.raises(ShapeError, match="one floating dtype"):
        attention_as_moe(x.float(), head, row=0, kind="softmax")
    with pytest.raises(ParameterError, match="scale must be finite"):
        attention_as_moe(x, head, row=0, kind="softmax", scale=math.nan)
    with pytest.raises(ParameterError, match="do not depend on a bias"):
        attention_as_moe(x, head, row=0, kind="softmax", bias="-log n")
