"""Attention against its formula; the matrix of all scores is never built."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.strategies import seeds
from tieline.core.errors import ParameterError, ShapeError, TielineError
from tieline.lab.attention import softmax_and_sigmoid
from tieline.lab.attention.softmax_and_sigmoid import (
    SelfAttention,
    sigmoid_attention,
    softmax_attention,
)

ROOT = Path(__file__).parents[4]
LENGTHS = [1, 255, 256, 257, 600]  # below, at and above the edges of a tile of 256


def formula(q, k, v, *, kind="sigmoid", causal=False, scale=None, bias=0.0):
    """G(s q kᵀ + b) v from the full matrix."""
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT) + bias
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    return (scores.sigmoid() if kind == "sigmoid" else scores.softmax(dim=-1)) @ v


def leaves(queries, keys, *, batch=(2,), d_key=3, d_value=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, d_key), (keys, d_key), (keys, d_value))
    tensors = [torch.randn(*batch, *s, generator=generator, dtype=torch.float64) for s in shapes]
    return [t.to(dtype).requires_grad_() for t in tensors]


def assert_same(ours, reference, inputs, **tolerance):
    """Values and all gradients agree; by default to the rounding of sums in float64."""
    tolerance = tolerance or {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(ours, reference, **tolerance)
    grad = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view_as(ours)
    for ours_grad, grad_of_reference in zip(
        torch.autograd.grad(ours, inputs, grad),
        torch.autograd.grad(reference, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours_grad, grad_of_reference, **tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_sigmoid_equals_its_formula_across_tile_edges(tokens, causal):
    q, k, v = leaves(tokens, tokens)
    ours = sigmoid_attention(q, k, v, causal=causal, bias=-1.5)
    assert_same(ours, formula(q, k, v, causal=causal, bias=-1.5), (q, k, v))


@pytest.mark.parametrize(("queries", "keys"), [(3, 600), (600, 3), (257, 513)])
def test_lengths_of_queries_and_keys_may_differ(queries, keys):
    q, k, v = leaves(queries, keys)
    assert_same(sigmoid_attention(q, k, v), formula(q, k, v), (q, k, v))
    ours = softmax_attention(q, k, v)
    assert_same(ours, formula(q, k, v, kind="softmax"), (q, k, v))


@given(
    seeds,
    st.integers(1, 40),
    st.sampled_from([(), (1,), (5,), (2, 3)]),
    st.booleans(),
    st.floats(-3, 3),
    st.none() | st.floats(-2, 2),
)
def test_both_kinds_equal_their_formula(seed, tokens, batch, causal, bias, scale):
    q, k, v = leaves(tokens, tokens, batch=batch, seed=seed)
    shared = {"causal": causal, "scale": scale}
    ours = sigmoid_attention(q, k, v, bias=bias, **shared)
    assert_same(ours, formula(q, k, v, bias=bias, **shared), (q, k, v))
    ours = softmax_attention(q, k, v, **shared)
    assert_same(ours, formula(q, k, v, kind="softmax", **shared), (q, k, v))


@pytest.mark.parametrize("tile", [1, 2, 3, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_the_tile_is_only_a_matter_of_speed(tile, causal, monkeypatch):
    q, k, v = leaves(7, 7, batch=(5,))
    untiled = sigmoid_attention(q, k, v, causal=causal, bias=0.5)
    monkeypatch.setattr(softmax_and_sigmoid, "TILE", tile)
    assert_same(sigmoid_attention(q, k, v, causal=causal, bias=0.5), untiled, (q, k, v))


@pytest.mark.parametrize("heads", range(1, 12))
def test_groups_of_heads_cover_each_head_once(heads, monkeypatch):
    monkeypatch.setattr(softmax_and_sigmoid, "TILE", 2)
    monkeypatch.setattr(softmax_and_sigmoid, "TILES_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    q, k, v = leaves(5, 5, batch=(heads,))
    groups = list(softmax_and_sigmoid._head_groups(q, k))
    assert [h for group in groups for h in range(heads)[group]] == list(range(heads))
    assert max(len(range(heads)[group]) for group in groups) <= 4
    assert_same(sigmoid_attention(q, k, v), formula(q, k, v), (q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal, monkeypatch):
    monkeypatch.setattr(softmax_and_sigmoid, "TILE", 2)
    for attention in (sigmoid_attention, softmax_attention):
        assert torch.autograd.gradcheck(
            lambda q, k, v, attend=attention: attend(q, k, v, causal=causal), leaves(5, 5)
        )


def test_the_op_keeps_the_rules_of_custom_operators():
    q, k, v = leaves(5, 6)
    torch.library.opcheck(softmax_and_sigmoid.sigmoid_tiles, (q, k, v, 0.5, -1.0, False))


def test_minus_log_n_divides_small_weights_by_the_number_of_keys():
    q, k, v = leaves(40, 50)
    ours = sigmoid_attention(q, k, v, bias="-log n")
    assert_same(ours, formula(q, k, v, bias=-math.log(50)), (q, k, v))
    zero = torch.zeros(1, 64, 2, dtype=torch.float64)
    ones = torch.ones(1, 64, 1, dtype=torch.float64)
    row = sigmoid_attention(zero, zero, ones, bias="-log n")
    torch.testing.assert_close(row, torch.full_like(ones, 64 / 65), rtol=1e-14, atol=0)


def test_no_bias_is_the_plain_form():
    q, k, v = leaves(4, 4)
    assert torch.equal(sigmoid_attention(q, k, v), sigmoid_attention(q, k, v, bias=0.0))


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (3, 0), (0, 3)])
def test_empty_sequences_give_empty_or_zero_rows_and_zero_gradients(queries, keys):
    q, k, v = leaves(queries, keys)
    for attention in (sigmoid_attention, softmax_attention):
        out = attention(q, k, v)
        assert out.shape == (2, queries, 4)
        assert not out.any()
    out = sigmoid_attention(q, k, v, bias="-log n")
    for grad, leaf in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == leaf.shape
        assert not grad.any()


def test_no_heads_at_all():
    q, k, v = leaves(3, 3, batch=(0, 2))
    out = sigmoid_attention(q, k, v)
    assert out.shape == (0, 2, 3, 4)
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [
        t.shape for t in (q, k, v)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_wide_and_rounded_once(dtype):
    q, k, v = leaves(300, 300, dtype=dtype)
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    ours, exact = sigmoid_attention(q, k, v), sigmoid_attention(*wide)
    assert torch.equal(ours, exact.to(dtype))
    grads = torch.autograd.grad(ours.sum(), (q, k, v))
    for grad, exact_grad in zip(grads, torch.autograd.grad(exact.sum(), wide), strict=True):
        assert torch.equal(grad, exact_grad.to(dtype))


def test_float32_is_as_exact_as_its_sums():
    q, k, v = leaves(600, 600, dtype=torch.float32)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}  # sums of 600 terms of size 1
    assert_same(sigmoid_attention(q, k, v), formula(q, k, v), (q, k, v), **tolerance)


def test_autocast_does_not_narrow_the_tiles():
    q, k, v = leaves(20, 20, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = sigmoid_attention(q, k, v)
    assert torch.equal(inside, sigmoid_attention(q, k, v))


def test_strided_inputs_and_expanded_gradients_are_as_good_as_contiguous_ones():
    q, k, v = (t.detach() for t in leaves(40, 40, batch=(3, 2)))
    strided = [t.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_() for t in (q, k, v)]
    plain = [t.clone().requires_grad_() for t in (q, k, v)]
    ours, reference = sigmoid_attention(*strided), sigmoid_attention(*plain)
    assert torch.equal(ours, reference)
    grads = torch.autograd.grad(ours.sum(), strided)
    for grad, other in zip(grads, torch.autograd.grad(reference.sum(), plain), strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-13, atol=1e-13)


def test_a_causal_row_does_not_feel_what_comes_after_it():
    q, k, v = (t.detach() for t in leaves(600, 600))
    later_k, later_v = k.clone(), v.clone()
    later_k[:, 300:], later_v[:, 300:] = 7, -5
    for attention in (sigmoid_attention, softmax_attention):
        original, changed = (
            attention(q, *kv, causal=True)[:, :300] for kv in ((k, v), (later_k, later_v))
        )
        assert torch.equal(original, changed)


OP_BODIES = {  # a dispatch mode sees an operator as one step; these are the steps within
    torch.ops.tieline.sigmoid_attention.default: softmax_and_sigmoid.sigmoid_tiles._init_fn,
    torch.ops.tieline.sigmoid_attention_backward.default: (
        softmax_and_sigmoid._sigmoid_tiles_backward._init_fn
    ),
}


class LargestTensor(TorchDispatchMode):
    """Counts products, and records the most elements of any storage that a step touches."""

    def __init__(self):
        super().__init__()
        self.elements = self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in OP_BODIES:
            with self:
                return OP_BODIES[func](*args)
        out = func(*args, **(kwargs or {}))
        self.products += "bmm" in func.name()
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                size = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.elements = max(self.elements, size)
        return out


@pytest.mark.parametrize("causal", [False, True])
def test_no_matrix_of_all_queries_by_all_keys_exists(causal, monkeypatch):
    monkeypatch.setattr(softmax_and_sigmoid, "TILE", 30)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    q, k, v = leaves(300, 300, batch=(8,), d_key=4)
    with LargestTensor() as largest:
        sigmoid_attention(q, k, v, causal=causal).sum().backward()
    count = 55 if causal else 100
    assert largest.products == 2 * (2 + 5) * count  # two groups of heads, forward and backward
    assert largest.elements == 8 * 300 * 4  # the inputs; a tile of four heads has 4 * 30 * 30
    with LargestTensor() as largest:
        formula(q, k, v, causal=causal)
    assert largest.elements == 8 * 300 * 300


def test_the_tiles_in_use_are_small(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    q, k, v = leaves(700, 700, batch=(9,), d_key=1, d_value=1)
    with LargestTensor() as largest:
        sigmoid_attention(q, k, v).sum().backward()
    assert largest.elements <= 2 * 4 * 256 * 256


def test_nothing_but_the_inputs_is_saved_for_backward():
    q, k, v = leaves(5, 5)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sigmoid_attention(q, k, v)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (q, k, v)}


def test_a_causal_call_leaves_out_the_tiles_above_the_diagonal(monkeypatch):
    monkeypatch.setattr(softmax_and_sigmoid, "TILE", 4)
    count, weigh = [], softmax_and_sigmoid._write_weights_
    monkeypatch.setattr(
        softmax_and_sigmoid, "_write_weights_", lambda *a: count.append(1) or weigh(*a)
    )
    sigmoid_attention(*leaves(16, 16), causal=True)
    assert len(count) == 4 * 5 / 2


def test_a_second_derivative_is_refused_not_wrong():
    q, k, v = leaves(4, 4)
    (grad,) = torch.autograd.grad(sigmoid_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(grad.sum(), q)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend):
    command = [sys.executable, "-m", "tests.lab.attention.compiled_attention", backend]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# The layer


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("projection_bias", [False, True])
def test_the_layer_is_its_heads_side_by_side(kind, causal, projection_bias):
    layer = SelfAttention(6, 3, kind=kind, causal=causal, projection_bias=projection_bias).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    heads = [
        formula(
            *(
                x @ weight + (0 if bias is None else bias)
                for weight, bias in zip(head[:3], head[3:], strict=True)
            ),
            kind=kind,
            causal=causal,
        )
        for head in (layer.head(h) for h in range(3))
    ]
    expected = layer.out(torch.cat(heads, dim=-1))
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x[0]), expected[0], rtol=1e-12, atol=1e-12)


def test_the_layer_hands_on_scale_and_bias_and_trains():
    layer = SelfAttention(4, 2, kind="sigmoid", scale=0.3, bias="-log n").double()
    x = torch.randn(7, 4, dtype=torch.float64)
    q, k, v = (
        p(x).unflatten(-1, (2, 2)).transpose(0, 1) for p in layer.children() if p != layer.out
    )
    heads = formula(q, k, v, scale=0.3, bias=-math.log(7))
    expected = layer.out(heads.transpose(0, 1).flatten(1))
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    layer(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert not list(layer.buffers())


# Refusals


@pytest.mark.parametrize(
    ("shapes", "rule"),
    [
        (((4, 3), (4, 2), (4, 3)), "one dimension"),
        (((4, 0), (4, 0), (4, 3)), "one dimension"),
        (((4, 3), (5, 3), (4, 3)), "value for every key"),
        (((1, 4, 3), (2, 4, 3), (2, 4, 3)), "leading axes"),
        (((4, 3), (4, 3), (1, 4, 3)), "leading axes"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_their_values(shapes, rule):
    tensors = [torch.zeros(s) for s in shapes]
    for attention in (sigmoid_attention, softmax_attention):
        with pytest.raises(ShapeError, match=rule) as error:
            attention(*tensors)
        assert all(str(tuple(t.shape)) in str(error.value) for t in tensors)


def test_causal_lengths_must_agree():
    q, k, v = leaves(3, 4)
    with pytest.raises(ShapeError, match="as many keys as queries"):
        sigmoid_attention(q, k, v, causal=True)


@pytest.mark.usefixtures("no_axis_checks")
def test_vectors_and_integers_are_refused():
    with pytest.raises(ShapeError, match="length and a dimension"):
        sigmoid_attention(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    with pytest.raises(ShapeError, match=r"floating dtype.*int64"):
        softmax_attention(*(torch.zeros(2, 3, dtype=torch.int64) for _ in range(3)))


def test_mixed_dtypes_are_refused():
    q, k, v = leaves(3, 3)
    with pytest.raises(ShapeError, match=r"float64.*float32"):
        sigmoid_attention(q, k.float(), v)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_is_refused(scale):
    q, k, v = leaves(3, 3)
    for attention in (sigmoid_attention, softmax_attention):
        with pytest.raises(ParameterError, match=f"scale must be finite, got scale={scale}"):
            attention(q, k, v, scale=scale)
    with pytest.raises(ParameterError, match="scale must be finite"):
        SelfAttention(4, 2, scale=scale)


@pytest.mark.usefixtures("no_axis_checks")
@pytest.mark.parametrize("bias", [math.nan, math.inf, "log n"])
def test_a_bias_that_means_nothing_is_refused(bias):
    q, k, v = leaves(3, 3)
    with pytest.raises(ParameterError, match="bias must be"):
        sigmoid_attention(q, k, v, bias=bias)
    with pytest.raises(ParameterError, match="bias must be"):
        SelfAttention(4, 2, kind="sigmoid", bias=bias)


@pytest.mark.parametrize(("d_model", "n_heads"), [(6, 4), (6, 0), (0, 1), (3, 6)])
def test_heads_must_divide_the_width(d_model, n_heads):
    with pytest.raises(ParameterError, match=f"d_model={d_model}, n_heads={n_heads}"):
        SelfAttention(d_model, n_heads)


@pytest.mark.usefixtures("no_axis_checks")
def test_the_layer_refuses_unknown_kinds_idle_biases_and_other_widths():
    with pytest.raises(ParameterError, match="'relu'"):
        SelfAttention(4, 2, kind="relu")
    with pytest.raises(ParameterError, match="do not depend on a bias"):
        SelfAttention(4, 2, bias=1.0)
    with pytest.raises(ShapeError, match=r"\(\.\.\., N, 4\), got \(2, 5\)"):
        SelfAttention(4, 2)(torch.zeros(2, 5))
    with pytest.raises(TielineError, match="got 2"):
        SelfAttention(4, 2).head(2)


def masked_formula(q, k, v, mask, bias):
    """Σ_j σ(q·k_j/√d + b_i) v_j over the visible keys; b_i is b or -log of their number."""
    mask = mask.expand(*q.shape[:-1], k.shape[-2]).double()
    if bias == "-log seen":
        bias = -mask.sum(-1, keepdim=True).clamp(min=1).log()
    weights = mask / (1 + torch.exp(-(q @ k.mT / q.shape[-1] ** 0.5 + bias)))
    return weights @ v


def some_mask(kind, queries=11, keys=13):
    generator = torch.Generator().manual_seed(7)
    lead = {"all": (), "sequence": (2, 1), "head": (2, 3), "heads": (1, 3), "blind": (2, 1)}[kind]
    mask = torch.rand(*lead, queries, keys, generator=generator) < 0.4
    if kind == "blind":  # rows without keys, and tiles that are masked entirely
        mask[..., :5, :] = False
        mask[..., 4:9] = False
    return mask


@pytest.mark.parametrize("tile", [4, 256])
@pytest.mark.parametrize("bias", [-0.7, "-log seen"])
@pytest.mark.parametrize("kind", ["all", "sequence", "head", "heads", "blind"])
def test_masks_hide_keys_and_bias_counts_those_that_are_seen(kind, bias, tile, monkeypatch):
    monkeypatch.setattr(softmax_and_sigmoid, "TILE", tile)
    mask, generator = some_mask(kind), torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, 3, n, 5, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (11, 13, 13)
    )
    ours = sigmoid_attention(q, k, v, bias=bias, mask=mask)
    assert_same(ours, masked_formula(q, k, v, mask, bias), (q, k, v))


def test_a_causal_bias_counts_the_keys_up_to_the_query():
    q, k, v = leaves(9, 9)
    causal_mask = torch.ones(9, 9, dtype=torch.bool).tril()
    ours = sigmoid_attention(q, k, v, causal=True, bias="-log seen")
    assert_same(ours, masked_formula(q, k, v, causal_mask, "-log seen"), (q, k, v))
    both = sigmoid_attention(
        q, k, v, causal=True, bias="-log seen", mask=torch.ones_like(causal_mask)
    )
    torch.testing.assert_close(both, ours)
    rows = [
        sigmoid_attention(q[:, [i]], k[:, : i + 1], v[:, : i + 1], bias="-log seen")
        for i in range(9)
    ]
    torch.testing.assert_close(torch.cat(rows, dim=-2), ours)


def test_a_hidden_key_may_be_anything():
    q, k, v = (x.detach() for x in leaves(4, 4))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:, 2] = False
    expected = sigmoid_attention(q, k, v, mask=mask, bias=0.0)
    k = k.clone()
    k[..., 2, :] = torch.inf
    assert torch.equal(sigmoid_attention(q, k, v, mask=mask, bias=0.0), expected)


@pytest.mark.parametrize("mask", [torch.ones(4, 4), torch.ones(4, 5) > 0, torch.ones(3, 4, 4) > 0])
def test_masks_of_another_form_are_refused(mask):
    q, k, v = (torch.zeros(2, 4, 3) for _ in range(3))
    with pytest.raises((ShapeError, TypeCheckError), match=r"mask"):
        sigmoid_attention(q, k, v, mask=mask)
