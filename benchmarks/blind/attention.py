"""Attention whose queries, keys, values and mask can be edited, in any model of transformers.

with edited_attention(model, edit):
    model(input_ids=ids)
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "tieline_blind"


@dataclass(frozen=True)
class Attention:
    """What one attention layer is about to compute.

    Attributes:
        layer: index of the decoder layer.
        query: queries (rows, heads, length, width).
        key: keys (rows, key heads, all positions, width).
        value: values (rows, key heads, all positions, width).
        mask: what is added to the scores (rows, 1, length, all positions).
        scaling: factor of the scores.
    """

    layer: int
    query: Float[Tensor, "rows heads length width"]
    key: Float[Tensor, "rows groups total width"]
    value: Float[Tensor, "rows groups total width"]
    mask: Float[Tensor, "rows 1 length total"]
    scaling: float

    @property
    def hidden(self) -> float:
        """What is added to the score of a position that must not be seen."""
        return torch.finfo(self.mask.dtype).min


Edit = Callable[[Attention], Attention]
_edits: list[Edit] = []


def _edited(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    eager = sys.modules[type(module).__module__].eager_attention_forward  # knows sinks and groups
    if attention_mask is None:
        attention_mask = query.new_zeros(len(query), 1, query.shape[2], key.shape[2])
    layer = int(getattr(module, "layer_idx", 0))
    call = Attention(layer, query, key, value, attention_mask, scaling)
    for edit in _edits:
        call = edit(call)
    return eager(module, call.query, call.key, call.value, call.mask, call.scaling, **options)


AttentionInterface.register(NAME, _edited)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def edited_attention(model: Any, edit: Edit) -> Iterator[None]:
    """Inside the block every attention layer computes what `edit` returns."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _edits.append(edit)
    try:
        yield
    finally:
        _edits.remove(edit)
        model.set_attn_implementation(before)
