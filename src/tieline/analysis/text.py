"""The first tokens of a text with their gaps, and the loss of a model on it.

    L = mean over predicted tokens of -log P(x_t | x_<t)      nats

with a standard error clustered by sequence, because tokens of a sequence are not independent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from tieline.analysis.inspection import TextPiece, TextSample
from tieline.core.errors import require
from tieline.core.statistics import SequenceSums, next_token_losses
from tieline.measure.measures import scored
from tieline.models.running import batches, forward, only_running
from tieline.run.corpus import TokenisedText, tokenise
from tieline.trace.record import LayerTrace, RoutingTrace


def text_sample(trace: RoutingTrace, text: TokenisedText, most: int = 400) -> TextSample:
    """Return the first tokens of the text with gaps relative to each layer's median gap.

    Args:
        trace: routing of `text`, in order.
        text: what was routed.
        most: number of tokens, from the first sequence.
    """
    count = min(most, len(text.sequences[0]))
    texts = ["" for _ in text.prefix] + list(text.pieces)
    columns, scales = zip(*(_relative_gaps(layer, count) for layer in trace.layers), strict=True)
    pieces = []
    for place, gaps in enumerate(zip(*columns, strict=True)):
        known = [gap for gap in gaps if gap is not None]
        token, position = int(trace.tokens[place]), int(trace.positions[place])
        pieces.append(TextPiece(texts[place], token, position, min(known, default=None), gaps))
    names = tuple(layer.name for layer in trace.layers)
    return TextSample(names, int(trace.documents[0]), tuple(pieces), tuple(scales))


def _relative_gaps(layer: LayerTrace, count: int) -> tuple[list[float | None], float | None]:
    """Gaps of the first tokens over the median gap, and that median; None where unknown."""
    nothing: list[float | None] = [None] * count
    if scored(layer) != "ok":
        return nothing, None
    gaps = layer.gap
    middle = gaps.median().item()
    if not 0 < middle < float("inf"):
        return nothing, None
    return [gap if gap < float("inf") else None for gap in (gaps[:count] / middle).tolist()], middle


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
