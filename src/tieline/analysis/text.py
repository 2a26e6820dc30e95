"""From a text to sequences of tokens and back to its pieces, and the loss of a model on it.

    L = mean over predicted tokens of -log P(x_t | x_<t)      nats

with a standard error clustered by sequence, because tokens of a sequence are not independent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.analysis.inspection import TextPiece, TextSample
from tieline.core.errors import ParameterError, require
from tieline.core.statistics import SequenceSums, next_token_losses
from tieline.measure.measures import scored
from tieline.models.running import batches, forward, only_running
from tieline.trace.record import LayerTrace, RoutingTrace

CHARACTERS_PER_TOKEN = 8
"""First guess of how much text the tokens need."""


@dataclass(frozen=True)
class TokenisedText:
    """Tokens of a text, cut into sequences that all start with the tokenizer's prefix.

    Attributes:
        sequences: token ids of each sequence, prefix included; the last may be shorter.
        prefix: ids that the tokenizer puts before a text, such as a beginning of sequence.
        pieces: part of the text that each token after the prefix stands for, over all sequences.
        characters: how many characters of the text the tokens cover.
    """

    sequences: tuple[Int[Tensor, " _"], ...]
    prefix: tuple[int, ...]
    pieces: tuple[str, ...]
    characters: int

    @property
    def tokens(self) -> int:
        """Number of tokens, prefixes included."""
        return sum(len(sequence) for sequence in self.sequences)


def tokenise(tokenizer: Any, text: str, tokens: int, length: int) -> TokenisedText:
    """Cut the first tokens of a text into sequences of `length`.

    Args:
        tokenizer: a tokenizer of transformers.
        text: any text that is not empty.
        tokens: number of tokens wanted, prefixes included; a short text gives fewer.
        length: tokens per sequence.
    """
    require(tokens >= 1, f"need at least one token, got tokens={tokens}")
    require(bool(text.strip()), "the text is empty: there is nothing to route")
    prefix = _prefix(tokenizer)
    body = length - len(prefix)
    require(body >= 1, f"sequences need more than the prefix, got length={length}, {prefix=}")
    ids, pieces = _encode(tokenizer, text, tokens)
    require(len(ids) > 0, "the tokenizer makes no token of the text")
    wanted = _without_prefixes(tokens, length, len(prefix))
    ids, pieces = ids[:wanted], pieces[:wanted]
    rows = [[*prefix, *ids[start : start + body]] for start in range(0, len(ids), body)]
    sequences = tuple(torch.tensor(row) for row in rows)
    return TokenisedText(sequences, prefix, tuple(pieces), sum(map(len, pieces)))


def token_texts(text: TokenisedText) -> list[str]:
    """The part of the text that each token stands for, over all sequences; empty for a prefix."""
    pieces, start = iter(text.pieces), len(text.prefix)
    return [
        next(pieces, "") if place >= start else ""
        for sequence in text.sequences
        for place in range(len(sequence))
    ]


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


def _prefix(tokenizer: Any) -> tuple[int, ...]:
    """Special tokens that the tokenizer puts before every text."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer("a", verbose=False)["input_ids"]
    first = next((place for place, token in enumerate(full) if token == bare[0]), 0)
    return tuple(full[:first])


def _encode(tokenizer: Any, text: str, tokens: int) -> tuple[list[int], list[str]]:
    """Ids and pieces of at least `tokens` tokens, or of the whole text."""
    size = CHARACTERS_PER_TOKEN * tokens + 1
    while True:
        part = text[:size]
        ids, pieces = _encode_whole(tokenizer, part)
        if len(part) == len(text) or len(ids) > tokens + 8:  # a cut may change the last few
            return ids, pieces
        size *= 2


def _encode_whole(tokenizer: Any, text: str) -> tuple[list[int], list[str]]:
    quick = bool(getattr(tokenizer, "is_fast", False))
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=quick, verbose=False)
    ids = list(found["input_ids"])
    if not quick:
        return ids, [tokenizer.decode([token]) for token in ids]
    # a character of several tokens belongs to the first, skipped ones to the token that follows
    ends = list(accumulate((end for _, end in found["offset_mapping"]), max))
    return ids, [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _without_prefixes(tokens: int, length: int, prefix: int) -> int:
    """Number of text tokens in `tokens`, each sequence of `length` spending some on its prefix."""
    whole, rest = divmod(tokens, length)
    left = max(0, rest - prefix)
    found = whole * (length - prefix) + left
    if found < 1:
        raise ParameterError(f"{tokens} tokens leave none beside a prefix of {prefix}")
    return found


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
