"""The loss of a model on a text; the model may be dense.

    L = mean over predicted tokens of -log P(x_t | x_<t)      nats

with a standard error clustered by sequence, because tokens of a sequence are not independent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from tieline.core.errors import require
from tieline.core.statistics import SequenceSums, next_token_losses
from tieline.models.running import batches, forward, only_running
from tieline.run.corpus import tokenise


class TextLoss(NamedTuple):
    """Mean loss in nats per token, its standard error clustered by sequence, tokens predicted.

    None for a single sequence.
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
    """Compute the loss on the first tokens of a text, in independent sequences.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        text: any text.
        tokens: how many of its tokens.
        length: tokens per sequence.
        batch_size: sequences per forward pass.
        progress: called with the sequences done and their number.
    """
    sequences = [row for row in tokenise(tokenizer, text, tokens, length).sequences if len(row) > 1]
    require(bool(sequences), "the text is too short: it has no token to predict")
    sums, done = SequenceSums(), 0
    with only_running(model):
        for ids in batches(sequences, batch_size):
            sums.add(next_token_losses(forward(model, ids).logits, ids))
            done += len(ids)
            if progress is not None:
                progress(done, len(sequences))
    mean = sums.mean()
    assert mean.value is not None
    return TextLoss(mean.value, mean.standard_error, sum(len(row) - 1 for row in sequences))
