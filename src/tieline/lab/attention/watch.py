"""Looking at the queries, keys and values of a model's attention while it runs as always.

with watched_attention(model, sink):
    model(**batch)      # sink(name, call) for every attention layer

The model computes by SDPA inside the block. A model whose attention is more than a softmax of the
scores (sinks, capped scores, biases of positions) or takes no attention functions is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tieline.core.errors import UnsupportedModelError, require
from tieline.lab.attention.in_models import NOT_HONOURED

WATCHED = "tieline_watched"
"""The name by which transformers knows it."""

SINK = "tieline_attention_sink"
"""Attribute of an attention module that is looked at."""


class AttentionCall(NamedTuple):
    """What one attention layer was given.

    Attributes:
        query: (B, H, N, d).
        key: (B, H / g, M, d).
        value: (B, H / g, M, d_v).
        visible: which keys each query sees, (B or 1, 1 or H, N, M).
        scale: factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor
    scale: float


Sink = Callable[[str, AttentionCall], None]


def _watched_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Hand the call to the module's sink, then compute it by SDPA."""
    for name, reason in NOT_HONOURED.items():
        if options.get(name) is not None:
            raise UnsupportedModelError(f"attention with {name!r} is not looked at: {reason}")
    sink = module.__dict__.get(SINK)
    if sink is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        sink(AttentionCall(query, key, value, _visible_keys(query, key, attention_mask), scale))
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **options
    )


def _visible_keys(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """The boolean mask; without one, the keys up to the query."""
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask == 0
    shape = (1, 1, query.shape[2], key.shape[2])
    return torch.ones(shape, dtype=torch.bool, device=query.device).tril()


@contextmanager
def watched_attention(model: nn.Module, sink: Sink) -> Iterator[list[str]]:
    """Call `sink` with the name and the arguments of every attention layer that runs.

    Args:
        model: a causal model of transformers that takes attention functions.
        sink: called before the attention is computed; must not change anything.
    """
    setter: Any = getattr(model, "set_attn_implementation", None)
    config: Any = getattr(model, "config", None)
    require(setter is not None, f"{type(model).__name__} takes no attention function")
    before = config._attn_implementation
    layers = {n: m for n, m in model.named_modules() if n.endswith(("self_attn", "attention"))}
    try:
        setter(WATCHED)
    except ValueError as problem:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes no attention function of others: {problem}"
        ) from problem
    for name, module in layers.items():
        module.__dict__[SINK] = _with_name(sink, name)
    try:
        yield list(layers)
    finally:
        for module in layers.values():
            del module.__dict__[SINK]
        setter(before)


def _with_name(sink: Sink, name: str) -> Callable[[AttentionCall], None]:
    return lambda call: sink(name, call)


AttentionInterface.register(WATCHED, _watched_forward)
AttentionMaskInterface.register(WATCHED, sdpa_mask)
