"""Documents of token ids: windows of the text in the box, whose halves belong to the split's."""

from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from tieline.models.demo import demo_text, load_demo_tokenizer

Half = Literal["development", "held-out"]

VOCABULARY = 512
"""Tokens of the tokenizer in the box, which all models share but the SmolLM2 mixture."""

Documents = Int[Tensor, "documents length"]


@cache
def tokenizer_in_box() -> Any:
    """Return the tokenizer in the box."""
    return load_demo_tokenizer()


@cache
def token_stream(tokenizer: Any) -> Int[Tensor, " tokens"]:
    """Return the token ids of the text in the box."""
    return torch.tensor(tokenizer(demo_text())["input_ids"])


def documents(tokenizer: Any, half: Half, count: int, length: int, seed: int) -> Documents:
    """Return random windows of one half of the text."""
    stream = token_stream(tokenizer)
    middle = len(stream) // 2
    stretch = stream[:middle] if half == "development" else stream[middle:]
    return _windows(stretch, count, length, torch.Generator().manual_seed(seed))


def training_rows(count: int, length: int, generator: torch.Generator) -> Documents:
    """Return random windows of the whole text for brief training."""
    return _windows(token_stream(tokenizer_in_box()), count, length, generator)


def _windows(
    stream: Int[Tensor, " tokens"], count: int, length: int, generator: torch.Generator
) -> Documents:
    starts = torch.randint(len(stream) - length, (count,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)]


def commonest(ids: Documents) -> int:
    """Return the token that occurs most often."""
    return int(ids.flatten().mode().values)
