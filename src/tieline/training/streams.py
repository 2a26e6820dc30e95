"""Text as streams of token ids: what a run trains on and what it is scored on.

    shipped    bytes of the text in the box: no download
    enwik8     bytes, 256 tokens; 90 / 5 / 5 million bytes (the usual split)
    text8      a to z and space, 27 tokens, made from enwik8 (`data_text8`)
    wikitext   byte-level BPE of the WikiText-103 splits that are here (`data_wikitext`)

Window i of a training stream begins where draw i of one generator says, so data order depends on
the seed alone and a run that goes on after a kill sees what it would have seen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from tieline.errors import require
from tieline.hf.shipped import shipped_text
from tieline.training.config import DataConfig
from tieline.training.data_enwik8 import enwik8_file
from tieline.training.data_text8 import LETTERS, text8_ids
from tieline.training.data_wikitext import wikitext_streams
from tieline.training.vocabularies import byte_tokenizer, letter_tokenizer

__all__ = ["STREAMS", "TextStreams", "Windows", "load_streams"]

Stream = Integer[Tensor, " _"]
TRAIN, HELD = 90_000_000, 5_000_000


@dataclass(frozen=True, eq=False)
class TextStreams:
    """Token ids of the splits, and what is needed to read them.

    Attributes:
        train: what windows are drawn from.
        validation: held out, for choosing.
        test: held out, for reporting.
        tokenizer: maps text to these ids and back.
        about: where the text comes from and how it is split.
        words: number of words of a held-out split, where perplexity is told per word.
        attacked: held-out splits with words replaced, by name.
    """

    train: Stream
    validation: Stream
    test: Stream
    tokenizer: PreTrainedTokenizerFast
    about: str
    words: dict[str, int] = field(default_factory=dict)
    attacked: dict[str, Stream] = field(default_factory=dict)


class Windows(Dataset[dict[str, Tensor]]):
    """`length` windows of a stream, drawn by a seed; each is its own target.

    Args:
        stream: token ids.
        context: tokens of a window.
        length: number of windows.
        seed: of the draws.
    """

    def __init__(self, stream: Stream, *, context: int, length: int, seed: int) -> None:
        require(
            stream.numel() >= context >= 2,
            f"windows of {context} tokens do not fit a stream of {stream.numel()}",
        )
        generator = torch.Generator().manual_seed(seed)
        last = stream.numel() - context + 1
        self.stream, self.context = stream, context
        self.starts = torch.randint(last, (length,), generator=generator)

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Ids of window `index` as int64; the model shifts the labels itself."""
        start = int(self.starts[index])
        ids = self.stream[start : start + self.context].long()
        return {"input_ids": ids, "labels": ids}


def load_streams(data: DataConfig) -> TextStreams:
    """The streams of a data set by the name of its loader."""
    require(data.name in STREAMS, f"{data.name!r} is not one of the texts {sorted(STREAMS)}")
    return STREAMS[data.name](**data.options)


def _enwik8() -> TextStreams:
    # copy on write: nobody writes, and torch wants memory that may be written
    ids = torch.from_numpy(np.memmap(enwik8_file(), dtype=np.uint8, mode="c"))
    about = "enwik8, bytes; 90 M train, 5 M validation, 5 M test"
    return TextStreams(*_split(ids, TRAIN, HELD), byte_tokenizer(), about)


def _shipped() -> TextStreams:
    raw = shipped_text().encode()
    ids = torch.tensor(list(raw), dtype=torch.uint8)
    held = ids.numel() // 10
    about = f"the text in the box, {ids.numel():,} bytes; 80 / 10 / 10 %"
    return TextStreams(*_split(ids, ids.numel() - 2 * held, held), byte_tokenizer(), about)


def _text8() -> TextStreams:
    ids = torch.from_numpy(text8_ids(enwik8_file()))
    held = ids.numel() // 20
    about = f"a-z and space from enwik8, {ids.numel():,} characters; 90 / 5 / 5 %"
    return TextStreams(*_split(ids, ids.numel() - 2 * held, held), letter_tokenizer(LETTERS), about)


@lru_cache(maxsize=1)
def _wikitext(vocabulary: int = 512, rate: float = 0.025, seed: int = 0) -> TextStreams:
    return TextStreams(**wikitext_streams(vocabulary, rate, seed))


def _split(ids: Stream, train: int, held: int) -> tuple[Stream, Stream, Stream]:
    return ids[:train], ids[train : train + held], ids[train + held : train + 2 * held]


STREAMS: dict[str, Callable[..., TextStreams]] = {
    "shipped": _shipped,
    "enwik8": _enwik8,
    "text8": _text8,
    "wikitext": _wikitext,
}
"""Loaders by name."""
