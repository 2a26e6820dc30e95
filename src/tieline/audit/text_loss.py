"""Loss of a language model on a text.

    L = mean over predicted tokens of -log P(x_t | x_<t)      nats

with the standard error of a mean over sequences, whose tokens are not independent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tieline.audit.running import batches, forward, only_running
from tieline.audit.text import tokenise
from tieline.errors import require

__all__ = ["TextLoss", "text_loss"]


class TextLoss(NamedTuple):
    """Mean loss in nats per token, its standard error clustered by sequence, tokens predicted.

    A single sequence tells no standard error.
    """

    value: float
    error: float | None
    tokens: int


def text_loss(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    tokens: int = 16384,
    length: int = 256,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> TextLoss:
    """The loss on the first tokens of a text, in sequences that know nothing of each other.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        text: any text.
        tokens: how many of its tokens.
        length: tokens per sequence.
        batch_size: sequences per forward pass.
        progress: is told how many sequences are done, and of how many.
    """
    sequences = [row for row in tokenise(tokenizer, text, tokens, length).sequences if len(row) > 1]
    require(bool(sequences), "the text is too short: it has no token to predict")
    sums, counts = [], []
    with only_running(model):
        for ids in batches(sequences, batch_size):
            logits = forward(model, ids).logits[:, :-1].float()
            each = F.cross_entropy(
                logits.flatten(0, 1), ids[:, 1:].flatten().to(logits.device), reduction="none"
            )
            sums += each.view(len(ids), -1).double().sum(dim=1).tolist()
            counts += [ids.shape[1] - 1] * len(ids)
            if progress is not None:
                progress(len(counts), len(sequences))
    return _clustered(torch.tensor(sums, dtype=torch.float64), torch.tensor(counts))


def _clustered(sums: torch.Tensor, counts: torch.Tensor) -> TextLoss:
    """Ratio of sums with the standard error of a ratio over clusters."""
    total, clusters = counts.sum(), len(sums)
    mean = sums.sum() / total
    if clusters == 1:
        return TextLoss(mean.item(), None, int(total))
    spread = (sums - mean * counts).square().sum() * clusters / (clusters - 1)
    return TextLoss(mean.item(), (spread.sqrt() / total).item(), int(total))
