"""Sigmoid attention tile by tile, so that no matrix of all queries by all keys ever exists.

    P   = σ(s q kᵀ + b)              a tile of weights: some heads, rows of queries, columns of keys
    out = P v
    dv  = Pᵀ g                       g the gradient of out
    dS  = (g vᵀ) ⊙ P ⊙ (1 − P)       P computed anew: one product instead of a saved N × M matrix
    dq  = s dS k,   dk = dSᵀ (s q)

An element of P needs no other element of its row, so tiles may come in any order and every sum is
added in place. The scratch of a call is one tile (two in backward), small enough to stay in the
cache of the core that works on it, and is used again for every tile. A causal call leaves out the
tiles above the diagonal. Low-precision inputs are computed in float32 and rounded once.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tieline.routing.buffers import take_buffer

__all__ = ["COLUMNS", "ROWS", "sigmoid_tiles"]

ROWS, COLUMNS = 256, 512  # rows divide columns, so one tile holds all of a row block's diagonal


class _Tile(NamedTuple):
    """Where a tile lies in (heads, queries, keys), and whether its end is the causal diagonal."""

    heads: slice
    rows: slice
    columns: slice
    diagonal: bool


def _tiles(batch: int, queries: int, keys: int, causal: bool) -> Iterator[_Tile]:
    step = _heads_per_tile(batch, queries, keys)
    for head in range(0, batch, step):
        for row in range(0, queries, ROWS):
            last = min(row + ROWS, queries)
            end = last if causal else keys
            for column in range(0, end, COLUMNS):
                stop = min(column + COLUMNS, end)
                place = slice(head, head + step), slice(row, last), slice(column, stop)
                yield _Tile(*place, causal and stop == end)


def _heads_per_tile(batch: int, queries: int, keys: int) -> int:
    """Heads in one batched product: a full tile of elements per thread, in groups of equal size."""
    elements = max(1, min(queries, ROWS) * min(keys, COLUMNS))
    most = torch.get_num_threads() * max(1, ROWS * COLUMNS // elements)
    groups = -(-batch // most)
    return max(1, -(-batch // max(1, groups)))


class _Scratch:
    """One tile's worth of memory, handed out in the shape of each tile."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        (batch, queries, _), keys = q.shape, k.shape[1]
        heads = _heads_per_tile(batch, queries, keys)
        self.memory = q.new_empty(heads * min(queries, ROWS) * min(keys, COLUMNS))

    def shaped_for(self, rows: Tensor, columns: Tensor) -> Tensor:
        shape = (rows.shape[0], rows.shape[1], columns.shape[1])
        return self.memory[: math.prod(shape)].view(shape)


def _weigh_(tile: Tensor, q: Tensor, k: Tensor, bias: float, above: Tensor | None) -> None:
    """Tile = σ(q kᵀ + bias), 0 where `above` (the keys after each query of the last square)."""
    torch.bmm(q, k.mT, out=tile)
    if bias:
        tile.add_(bias)
    if above is not None:
        size = tile.shape[1]
        tile[:, :, -size:].masked_fill_(above[:size, :size], -math.inf)
    tile.sigmoid_()


def _above_diagonal(q: Tensor, causal: bool) -> Tensor | None:
    size = min(q.shape[1], ROWS)
    return q.new_ones(size, size, dtype=torch.bool).triu_(1) if causal else None


def _prepared(x: Tensor) -> Tensor:
    """All heads in one axis, contiguous, in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]).contiguous()


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return take_buffer(shape, like).zero_()


@torch.library.custom_op("tieline::sigmoid_attention", mutates_args=())
def sigmoid_tiles(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: float, causal: bool
) -> Tensor:
    """σ(scale q kᵀ + bias) v (..., N, d_v) for checked arguments; see `sigmoid_attention`."""
    shape, dtype = (*q.shape[:-1], v.shape[-1]), q.dtype
    q, k, v = _prepared(q) * scale, _prepared(k), _prepared(v)
    out, scratch, above = _zeros((*q.shape[:2], v.shape[2]), q), _Scratch(q, k), None
    above = _above_diagonal(q, causal)
    for heads, rows, columns, diagonal in _tiles(q.shape[0], q.shape[1], k.shape[1], causal):
        q_tile, k_tile = q[heads, rows], k[heads, columns]
        weights = scratch.shaped_for(q_tile, k_tile)
        _weigh_(weights, q_tile, k_tile, bias, above if diagonal else None)
        out[heads, rows].baddbmm_(weights, v[heads, columns])
    return out.to(dtype).view(shape)


@sigmoid_tiles.register_fake
def _sigmoid_tiles_fake(q, k, v, scale, bias, causal):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.custom_op("tieline::sigmoid_attention_backward", mutates_args=())
def _sigmoid_tiles_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in q, k and v; those of keys are summed transposed, where products run along."""
    inputs = (q, k, v)
    g, q, k, v = _prepared(grad), _prepared(q) * scale, _prepared(k), _prepared(v)
    dq, dk, dv = (_zeros(tuple(t.shape), t) for t in (q, k.mT, v.mT))
    weights_scratch, scores_scratch = _Scratch(q, k), _Scratch(q, k)
    above = _above_diagonal(q, causal)
    for heads, rows, columns, diagonal in _tiles(q.shape[0], q.shape[1], k.shape[1], causal):
        q_tile, g_tile, k_tile = q[heads, rows], g[heads, rows], k[heads, columns]
        weights = weights_scratch.shaped_for(q_tile, k_tile)
        _weigh_(weights, q_tile, k_tile, bias, above if diagonal else None)
        dv[heads, :, columns].baddbmm_(g_tile.mT, weights)
        d_scores = scores_scratch.shaped_for(q_tile, k_tile)
        torch.bmm(g_tile, v[heads, columns].mT, out=d_scores)
        torch.ops.aten.sigmoid_backward.grad_input(d_scores, weights, grad_input=d_scores)
        dq[heads, rows].baddbmm_(d_scores, k_tile)
        dk[heads, :, columns].baddbmm_(q_tile.mT, d_scores)
    grads = (dq.mul_(scale), dk.mT, dv.mT)
    dq, dk, dv = (d.to(x.dtype).reshape(x.shape) for d, x in zip(grads, inputs, strict=True))
    return dq, dk, dv


@_sigmoid_tiles_backward.register_fake
def _sigmoid_tiles_backward_fake(grad, q, k, v, scale, bias, causal):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.bias, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    grads = _sigmoid_tiles_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.bias, ctx.causal)
    return (*grads, None, None, None)


sigmoid_tiles.register_autograd(_backward, setup_context=_save)
