"""Self-attention with softmax or sigmoid weights, as functions and as a multi-head layer.

With softmax tokens compete for a row's unit mass, with sigmoid each is weighted alone; a row of
either is a mixture of experts (`head_mixture`). Neither builds the matrix of all queries by keys.

Sigmoid attention goes tile by tile:

    P   = σ(s q kᵀ + b + r)          a tile of weights: some heads, a block of queries, one of keys;
                                     r one number per query; 0 where the mask hides a key
    out = P v
    dv  = Pᵀ g                       g the gradient of out
    dS  = (g vᵀ) ⊙ P ⊙ (1 − P)       P recomputed: one product instead of a saved matrix
    dq  = s dS k,   dk = dSᵀ (s q)

Elements of P do not depend on others of their row, so every sum over tiles is added in place. The
scratch of a call is one tile (two in backward), which stays in cache and is reused for every tile.
Tiles without any visible key are skipped: those above the diagonal of a causal call, and those that
a mask hides from all sequences. Sums are kept in contiguous blocks, those over
queries transposed, where batched products are fastest. Inputs narrower than float32 are computed in
float32 and rounded once.

Heads are split over threads once (`in_shares`), instead of every operator over all cores: many
small operators synchronise all cores after each, and whatever else runs on the machine then delays
every core (measured at load 8: five times the processor time).
"""

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tieline.core.errors import ParameterError, ShapeError, require
from tieline.routing.buffer_pool import take_buffer

__all__ = [
    "AttentionKind",
    "HeadWeights",
    "ScoreBias",
    "SelfAttention",
    "check_kind",
    "score_bias",
    "score_scale",
    "sigmoid_attention",
    "softmax_attention",
]

AttentionKind = Literal["softmax", "sigmoid"]
ScoreBias = float | Literal["-log n", "-log seen"] | None

# Axes that must agree have different names: `_check_attention_inputs` compares them.
Queries = Float[Tensor, "... queries d_query"]
Keys = Float[Tensor, "... keys d_key"]
Values = Float[Tensor, "... values d_value"]
Mixed = Float[Tensor, "... queries d_value"]
Visible = Bool[Tensor, "... seeing seen"]


def softmax_attention(
    q: Queries, k: Keys, v: Values, *, causal: bool = False, scale: float | None = None
) -> Mixed:
    """softmax(s q kᵀ) v (paper 4, eq. 1), by torch's fused kernels; zero where there is no key.

    Arguments as for `sigmoid_attention`.
    """
    _check_attention_inputs(q, k, v, causal)
    factor = score_scale(scale, q.shape[-1])
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=factor)


def sigmoid_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias: ScoreBias = None,
    mask: Visible | None = None,
) -> Mixed:
    """σ(s q kᵀ + b) v (paper 4, eq. 2), computed in tiles; zero where there is no key.

    Differentiable once in q, k and v. Memory beyond inputs and output is a few tiles whatever the
    length; the backward pass recomputes the weights.

    Args:
        q: queries (..., N, d_k).
        k: keys (..., M, d_k).
        v: values (..., M, d_v).
        causal: whether query i sees the keys 0..i only; needs N = M.
        scale: s, 1/√d_k if None.
        bias: b: 0 for None, the plain form of paper 4, whose outputs grow with M; -log M for
            "-log n", with which the weights of a row initially sum to about 1; and minus the
            logarithm of the number of keys that the query itself sees for "-log seen", which does
            not depend on padding, on the keys after a query, or on how a sequence is cut into
            calls.
        mask: which keys each query sees, (N, M) or with leading axes of q, or 1 for some of them.
    """
    _check_attention_inputs(q, k, v, causal)
    factor = score_scale(scale, q.shape[-1])
    if mask is not None:
        _check_attention_mask(mask, q, k)
        mask = _mask_by_sequence(mask.tril() if causal else mask, q)
        causal = False
    constant, rows = _score_biases(bias, q, k, causal, mask)
    return sigmoid_tiles(q, k, v, factor, constant, causal, rows, mask)


def _score_biases(
    bias: ScoreBias, q: Tensor, k: Tensor, causal: bool, mask: Tensor | None
) -> tuple[float, Tensor | None]:
    """Bias common to all scores, and bias of each query (S, N) where queries differ."""
    if bias != "-log seen" or (mask is None and not causal):
        return score_bias(bias, k.shape[-2]), None
    if mask is None:
        counts = torch.arange(1, q.shape[-2] + 1, device=q.device).unsqueeze(0)
    else:
        counts = mask.sum(dim=-1).clamp(min=1)
    return 0.0, -counts.to(torch.promote_types(q.dtype, torch.float32)).log()


def _mask_by_sequence(mask: Visible, q: Tensor) -> Bool[Tensor, "sequences seeing seen"]:
    """Reduce the mask to (S, N, M), S runs of consecutive heads, as few as its axes allow."""
    lead = q.shape[:-2]
    mask_axes = (1,) * (len(lead) + 2 - mask.ndim) + tuple(mask.shape[:-2])
    axes = max((axis + 1 for axis, size in enumerate(mask_axes) if size > 1), default=0)
    runs = lead[:axes]
    small = mask.reshape(*mask_axes[:axes], *mask.shape[-2:]).expand(*runs, *mask.shape[-2:])
    return small.reshape(math.prod(runs), *mask.shape[-2:])


def _check_attention_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise unless the mask is boolean and broadcasts to (..., queries, keys)."""
    expected = (*q.shape[:-1], k.shape[-2])
    sizes = zip(reversed(mask.shape[:-2]), reversed(q.shape[:-2]), strict=False)
    fits = (
        mask.dtype == torch.bool
        and 2 <= mask.ndim <= q.ndim
        and mask.shape[-2:] == expected[-2:]
        and all(mask_size in (1, size) for mask_size, size in sizes)
    )
    require(
        fits,
        f"a mask is boolean {expected}, 1 for leading axes it does not tell apart, got "
        f"{tuple(mask.shape)} {mask.dtype}",
        ShapeError,
    )


def score_bias(bias: ScoreBias, n_keys: int) -> float:
    """Number b of a bias setting, with `n_keys` keys that are all seen."""
    if bias is None:
        return 0.0
    if isinstance(bias, str):
        by_count = bias in ("-log n", "-log seen")
        require(by_count, f"bias must be a number, None, '-log n' or '-log seen', got {bias!r}")
        return -math.log(max(n_keys, 1))
    require(math.isfinite(bias), f"bias must be finite, got {bias=}")
    return float(bias)


def score_scale(scale: float | None, dim: int) -> float:
    """Factor s of the scores, 1/√dim for None."""
    if scale is None:
        return 1 / math.sqrt(dim)
    require(math.isfinite(scale), f"scale must be finite, got {scale=}")
    return float(scale)


def _check_attention_inputs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Raise unless q, k and v have matching axes and one floating dtype."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    rules = {
        "q, k and v need a length and a dimension": min(q.ndim, k.ndim, v.ndim) >= 2,
        "q, k and v must have equal leading axes": q.shape[:-2] == k.shape[:-2] == v.shape[:-2],
        "queries and keys must have one dimension >= 1": q.shape[-1:] == k.shape[-1:] != (0,),
        "there must be a value for every key": k.shape[-2:-1] == v.shape[-2:-1],
        "causal attention needs as many keys as queries": not causal
        or q.shape[-2:-1] == k.shape[-2:-1],
    }
    for rule, holds in rules.items():
        require(holds, f"{rule}, got {shapes}", ShapeError)
    require(
        q.is_floating_point() and q.dtype == k.dtype == v.dtype,
        f"q, k and v must have one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}",
        ShapeError,
    )


def check_kind(kind: str, bias: ScoreBias) -> None:
    """Raise for an unknown kind, and for a bias with softmax, which it would not change."""
    kinds = get_args(AttentionKind)
    require(kind in kinds, f"kind must be one of {kinds}, got {kind!r}")
    require(
        kind == "sigmoid" or bias is None,
        f"softmax weights do not depend on a bias: bias must be None, got {bias!r}",
        ParameterError,
    )
    score_bias(bias, 1)


class HeadWeights(NamedTuple):
    """Maps (D, d) of one head, applied as x w, and their biases (d); None is a zero bias."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None


class SelfAttention(nn.Module):
    """Multi-head self-attention with softmax or sigmoid weights.

    Args:
        d_model: dimension D of a token.
        n_heads: number of heads, a divisor of D.
        kind: "softmax" or "sigmoid".
        causal: whether a token sees itself and those before it only.
        scale: factor of the scores, 1/√(D / heads) if None.
        bias: b added to sigmoid scores, see `sigmoid_attention`; None for softmax.
        projection_bias: whether the four projections have biases.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        kind: AttentionKind = "softmax",
        causal: bool = False,
        scale: float | None = None,
        bias: ScoreBias = None,
        projection_bias: bool = False,
    ) -> None:
        super().__init__()
        require(
            d_model >= 1 and n_heads >= 1 and d_model % n_heads == 0,
            f"heads must divide the dimension, got {d_model=}, {n_heads=}",
        )
        check_kind(kind, bias)
        score_scale(scale, d_model // n_heads)
        self.d_model, self.n_heads = d_model, n_heads
        self.kind, self.causal, self.scale = kind, causal, scale
        self.bias: ScoreBias = bias
        self.query, self.key, self.value, self.out = (
            nn.Linear(d_model, d_model, bias=projection_bias) for _ in range(4)
        )

    def forward(self, x: Float[Tensor, "*batch tokens dim"]) -> Float[Tensor, "*batch tokens dim"]:
        """Attention of every token to its sequence, (..., N, D) in and out."""
        require(
            x.ndim >= 2 and x.shape[-1] == self.d_model and x.is_floating_point(),
            f"tokens must be floating (..., N, {self.d_model}), got {tuple(x.shape)} {x.dtype}",
            ShapeError,
        )
        q, k, v = (self._split(project(x)) for project in (self.query, self.key, self.value))
        return self.out(self._attend(q, k, v).transpose(-3, -2).flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        """Split heads from the last axis."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(-3, -2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the heads, by the kind of this layer."""
        if self.kind == "softmax":
            return softmax_attention(q, k, v, causal=self.causal, scale=self.scale)
        return sigmoid_attention(q, k, v, causal=self.causal, scale=self.scale, bias=self.bias)

    def head(self, index: int) -> HeadWeights:
        """Weights of one head, in the form that `attention_as_moe` takes."""
        require(0 <= index < self.n_heads, f"need 0 <= head < {self.n_heads}, got {index}")
        dim = self.d_model // self.n_heads
        rows = slice(index * dim, (index + 1) * dim)
        layers = (self.query, self.key, self.value)
        maps = (layer.weight[rows].T for layer in layers)
        biases = (None if layer.bias is None else layer.bias[rows] for layer in layers)
        return HeadWeights(*maps, *biases)

    def extra_repr(self) -> str:
        """Dimensions and kind."""
        return (
            f"d_model={self.d_model}, n_heads={self.n_heads}, kind={self.kind!r}, "
            f"causal={self.causal}, bias={self.bias!r}"
        )


Tiles = tuple[tuple[int, ...], ...]
"""For each block of queries, the blocks of keys with a visible key."""

TILE = 256
"""Queries and keys of a tile."""

TILES_PER_THREAD = 4
"""Heads that a thread computes in one batched product, more if they are short."""

LEAST_SCORES_FOR_THREADS = 4 * TILE * TILE
"""Scores of a call from which threads pay off, about 1 ms for one core."""


@torch.library.custom_op("tieline::sigmoid_attention", mutates_args=())
def sigmoid_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: float,
    causal: bool,
    rows: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """σ(scale q kᵀ + bias + rows) v (..., N, d_v) for checked arguments; see `sigmoid_attention`.

    `rows` (S, N) is a further bias of each query and `mask` (S, N, M) says which keys it sees,
    both for S equal runs of consecutive heads.
    """
    shape, dtype = (*q.shape[:-1], v.shape[-1]), q.dtype
    q, k, v = _merge_leading_axes(q) * scale, _merge_leading_axes(k), _merge_leading_axes(v)
    masking = _tile_masking(q, k, bias, causal, rows, mask)
    out = take_buffer((*q.shape[:2], v.shape[2]), q)
    _run_over_heads(
        q,
        k,
        lambda heads: _write_heads(
            q[heads], k[heads], v[heads], out[heads], masking.of_heads(heads)
        ),
    )
    return out.to(dtype).view(shape)


def _write_heads(q: Tensor, k: Tensor, v: Tensor, out: Tensor, masking: "_Masking") -> None:
    """Write the output of some heads."""
    tile, total = _ReusedMemory(q), _ReusedMemory(q)
    for heads in _head_groups(q, k):
        group = masking.of_heads(heads)
        keys, values = k[heads].split(TILE, 1), v[heads].split(TILE, 1)
        blocks = zip(q[heads].split(TILE, 1), out[heads].split(TILE, 1), strict=True)
        for row, (queries, result) in enumerate(blocks):
            sums = total.shaped(*result.shape)
            for number, column in enumerate(group.tiles[row]):
                weights = tile.shaped(*queries.shape[:2], keys[column].shape[1])
                _write_weights_(weights, queries, keys[column], group, row, column)
                _add_product_(sums, weights, values[column], first=number == 0)
            result.copy_(sums) if group.tiles[row] else result.zero_()


@sigmoid_tiles.register_fake
def _sigmoid_tiles_fake(q, k, v, scale, bias, causal, rows=None, mask=None):
    """Shape and dtype of the output, for tracing."""
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.custom_op("tieline::sigmoid_attention_backward", mutates_args=())
def _sigmoid_tiles_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: float,
    causal: bool,
    rows: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in q, k and v."""
    shapes, dtype = (q.shape, k.shape, v.shape), q.dtype
    grad, q, k, v = (
        _merge_leading_axes(grad),
        _merge_leading_axes(q) * scale,
        _merge_leading_axes(k),
        _merge_leading_axes(v),
    )
    masking = _tile_masking(q, k, bias, causal, rows, mask)
    grads = [take_buffer(tuple(t.shape), t) for t in (q, k, v)]
    tensors = (grad, q, k, v, *grads)

    def write_gradients(heads: slice) -> None:
        part, hidden = [t[heads] for t in tensors], masking.of_heads(heads)
        scratch = _BackwardScratch(_ReusedMemory(q), _ReusedMemory(q), _ReusedMemory(q))
        for group in _head_groups(part[1], part[2]):
            blocks = _Blocks(*(t[group].split(TILE, 1) for t in part))
            _group_backward(blocks, scratch, hidden.of_heads(group))

    _run_over_heads(q, k, write_gradients)
    grads[0].mul_(scale)
    dq, dk, dv = (g.to(dtype).view(shape) for g, shape in zip(grads, shapes, strict=True))
    return dq, dk, dv


def _group_backward(x: "_Blocks", scratch: "_BackwardScratch", masking: "_Masking") -> None:
    """Write dq, dk and dv of one group of heads."""
    dk_sums, dv_sums = ([b.new_empty(b.mT.shape) for b in blocks] for blocks in (x.dk, x.dv))
    begun: set[int] = set()
    for row, (grad, q) in enumerate(zip(x.grad, x.q, strict=True)):
        dq_sums = scratch.total.shaped(*q.shape)
        for number, column in enumerate(masking.tiles[row]):
            k, first = x.k[column], column not in begun
            shape = (*q.shape[:2], k.shape[1])
            weights, d_scores = scratch.weights.shaped(*shape), scratch.d_scores.shaped(*shape)
            _write_weights_(weights, q, k, masking, row, column)
            _add_product_(dv_sums[column], grad.mT, weights, first)
            torch.bmm(grad, x.v[column].mT, out=d_scores)
            torch.ops.aten.sigmoid_backward.grad_input(d_scores, weights, grad_input=d_scores)
            _add_product_(dq_sums, d_scores, k, first=number == 0)
            _add_product_(dk_sums[column], q.mT, d_scores, first)
        x.dq[row].copy_(dq_sums) if masking.tiles[row] else x.dq[row].zero_()
        begun.update(masking.tiles[row])
    for blocks, sums in ((x.dk, dk_sums), (x.dv, dv_sums)):
        for column, block in enumerate(blocks):
            block.copy_(sums[column].mT) if column in begun else block.zero_()


@_sigmoid_tiles_backward.register_fake
def _sigmoid_tiles_backward_fake(grad, q, k, v, scale, bias, causal, rows=None, mask=None):
    """Shapes and dtypes of the three gradients, for tracing."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_tile_inputs(ctx, inputs, output):
    """Keep the inputs that the backward pass recomputes weights from."""
    *tensors, ctx.scale, ctx.bias, ctx.causal, rows, mask = inputs
    ctx.save_for_backward(*tensors, rows, mask)


def _sigmoid_tiles_gradients(ctx, grad):
    """Gradients of q, k and v; None for the numbers, the row biases and the mask."""
    *tensors, rows, mask = ctx.saved_tensors
    numbers = ctx.scale, ctx.bias, ctx.causal
    grads = _sigmoid_tiles_backward(grad, *tensors, *numbers, rows, mask)
    return (*grads, None, None, None, None, None)


sigmoid_tiles.register_autograd(_sigmoid_tiles_gradients, setup_context=_save_tile_inputs)


class _Masking(NamedTuple):
    """Biases of the scores of some heads, and the keys that they see."""

    bias: float
    causal: bool
    rows: Tensor | None
    mask: Tensor | None
    sequence: Tensor
    """For each head, its index in `rows` and `mask`."""
    tiles: Tiles

    def of_heads(self, heads: slice) -> "_Masking":
        """Select some heads."""
        return self._replace(sequence=self.sequence[heads])


def _rows_of_heads(x: Tensor, sequence: Tensor) -> Tensor:
    """Select the row of each head; a single row serves all heads."""
    return x if len(x) == 1 else x.index_select(0, sequence)


def _mask_tile(mask: Tensor, row: int, column: int) -> Tensor:
    """Block of the mask for one tile of queries and one of keys."""
    columns = slice(column * TILE, (column + 1) * TILE)
    return mask[:, row * TILE : (row + 1) * TILE, columns]


def _tile_masking(
    q: Tensor, k: Tensor, bias: float, causal: bool, rows: Tensor | None, mask: Tensor | None
) -> _Masking:
    """Bias, row biases, mask and visible tiles of a call, by sequence."""
    shared = max((len(x) for x in (rows, mask) if x is not None), default=1)
    heads_per_run = max(1, len(q) // max(1, shared))
    sequence = torch.arange(len(q), device=q.device) // heads_per_run
    row_biases = None if rows is None else rows.to(q.dtype)
    return _Masking(bias, causal, row_biases, mask, sequence, _visible_tiles(q, k, causal, mask))


def _visible_tiles(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tiles:
    """Find the tiles in which some key is visible."""
    n_rows, n_columns = (max(1, -(-x.shape[1] // TILE)) for x in (q, k))
    columns_by_row = [range(row + 1 if causal else n_columns) for row in range(n_rows)]
    if mask is None:
        return tuple(map(tuple, columns_by_row))
    return tuple(
        tuple(column for column in columns if bool(_mask_tile(mask, row, column).any()))
        for row, columns in enumerate(columns_by_row)
    )


def _write_weights_(
    tile: Tensor, q: Tensor, k: Tensor, masking: _Masking, row: int, column: int
) -> None:
    """Write σ(q kᵀ + bias) to the tile, 0 for keys that a query does not see."""
    torch.bmm(q, k.mT, out=tile)
    if masking.bias:
        tile.add_(masking.bias)
    if masking.rows is not None:
        bias = masking.rows[:, row * TILE : (row + 1) * TILE]
        tile.add_(_rows_of_heads(bias, masking.sequence).unsqueeze(-1))
    tile.sigmoid_()
    if masking.causal and row == column:
        tile.tril_()
    if masking.mask is not None:
        visible = _rows_of_heads(_mask_tile(masking.mask, row, column), masking.sequence)
        tile.masked_fill_(visible.logical_not(), 0)


def _add_product_(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add left · right to the total, or write it if it is the first."""
    if first:
        torch.bmm(left, right, out=total)
    else:
        total.baddbmm_(left, right)


class _Blocks(NamedTuple):
    """Inputs and results of one group of heads, cut along the sequence into blocks of `TILE`."""

    grad: tuple[Tensor, ...]
    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    dq: tuple[Tensor, ...]
    dk: tuple[Tensor, ...]
    dv: tuple[Tensor, ...]


class _ReusedMemory:
    """Memory reused for one tensor after another; the first request must be the largest."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._memory: Tensor | None = None
        self._views: dict[tuple[int, ...], Tensor] = {}

    def shaped(self, *shape: int) -> Tensor:
        """Return a view of the memory in this shape."""
        if self._memory is None:
            self._memory = take_buffer((math.prod(shape),), self._like)
        if shape not in self._views:
            self._views[shape] = self._memory[: math.prod(shape)].view(shape)
        return self._views[shape]


class _BackwardScratch(NamedTuple):
    """Scratch memory of one tile of the backward pass."""

    weights: _ReusedMemory
    d_scores: _ReusedMemory
    total: _ReusedMemory


def _head_groups(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Yield equal groups of heads whose tiles fit the caches of all threads."""
    elements = max(1, min(q.shape[1], TILE) * min(k.shape[1], TILE))
    most = torch.get_num_threads() * max(1, TILES_PER_THREAD * TILE * TILE // elements)
    heads = len(q)
    step = -(-heads // max(1, -(-heads // most)))
    return (slice(start, start + step) for start in range(0, heads, max(1, step)))


def _run_over_heads(q: Tensor, k: Tensor, work: Callable[[slice], None]) -> None:
    """Distribute heads over threads if the work is large enough."""
    heads, queries, keys = len(q), q.shape[1], k.shape[1]
    if q.device.type == "cpu" and heads * queries * keys >= LEAST_SCORES_FOR_THREADS:
        in_shares(heads, work)
    else:
        work(slice(0, heads))


def _merge_leading_axes(x: Tensor) -> Tensor:
    """Merge all leading axes into one, contiguous, in at least float32."""
    floats = x.to(torch.promote_types(x.dtype, torch.float32))
    return floats.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]).contiguous()


def in_shares(n_items: int, work: Callable[[slice], None]) -> None:
    """Call `work` on slices that cover 0..n_items, one per thread.

    With fewer items than threads, calls it once, with operators on all cores.

    `work` computes the items of a slice without gradients and writes the results itself.
    """
    threads = torch.get_num_threads()
    if threads == 1 or n_items < threads:
        work(slice(0, n_items))
        return
    edges = [n_items * i // threads for i in range(threads + 1)]
    shares = [slice(*pair) for pair in itertools.pairwise(edges)]
    inference = torch.is_inference_mode_enabled()  # like the gradient mode, a matter of the thread

    def run(share: slice) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(share)

    for _ in _thread_pool(threads).map(run, shares):
        pass


_lock = threading.Lock()
_pool: tuple[int, int, ThreadPoolExecutor] | None = None  # process, number of threads, threads


def _thread_pool(n: int) -> ThreadPoolExecutor:
    """Return this process's threads; a forked child inherits `_pool` but not its threads."""
    global _pool
    with _lock:
        if _pool is None or _pool[:2] != (os.getpid(), n):
            _pool = os.getpid(), n, _start_thread_pool(n)
        return _pool[2]


def _start_thread_pool(n: int) -> ThreadPoolExecutor:
    """Start `n` threads whose operators use one core each.

    Setting the number of cores of a thread also sets the default of new threads; a temporary thread
    restores it, so that no other thread is changed.
    """
    ready = threading.Barrier(n + 1)

    def use_one_core() -> None:
        torch.get_num_threads()  # reads the default now, or it would overwrite the next line later
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(n, "tieline", initializer=use_one_core)
    for _ in range(n):
        pool.submit(int)
    ready.wait()
    restore = threading.Thread(target=torch.set_num_threads, args=(n,))
    restore.start()
    restore.join()
    return pool
