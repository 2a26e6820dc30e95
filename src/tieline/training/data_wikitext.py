"""WikiText-103 as far as it is here: only its validation and test splits.

The paper trains on the 103 M words of the training split. That split is in no registry we may use,
so the small form learns from the validation split (218 k words), holds out its last tenth for
validation, and reports the test split (246 k words). With `wiki.train.tokens` in the same folder
the training split is used instead, which is the paper's form.

The attack replaces a word by "AAA" with a given rate (paper 1, appendix C.1). It adds letters that
a subword vocabulary splits into more tokens, so perplexity is told per word: exp(loss / words).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tieline.errors import require
from tieline.training.fetch import DataError, shared_folder
from tieline.training.vocabularies import bpe_tokenizer

__all__ = ["attacked", "wikitext_streams"]

REPLACEMENT = "AAA"


def attacked(text: str, rate: float, seed: int) -> str:
    """The text with each word replaced by "AAA" with probability `rate`; white space stays."""
    require(0 <= rate <= 1, f"the rate of replaced words must be in [0, 1], got {rate}")
    drawn = np.random.default_rng(seed)
    lines = []
    for line in text.split("\n"):
        words = line.split(" ")
        hit = drawn.random(len(words)) < rate
        lines.append(
            " ".join(REPLACEMENT if h and w else w for w, h in zip(words, hit, strict=True))
        )
    return "\n".join(lines)


def wikitext_streams(vocabulary: int, rate: float, seed: int) -> dict[str, Any]:
    """Fields of `TextStreams` for a byte-level BPE learnt from the training text.

    Args:
        vocabulary: tokens of the BPE, 256 or more.
        rate: share of words that the attack replaces.
        seed: of the attack.
    """
    require(vocabulary >= 256, f"a byte-level BPE has 256 tokens or more, got {vocabulary}")
    folder = shared_folder("wikitext-103")
    train, validation, about = _splits(folder)
    test = _read(folder / "wiki.test.tokens")
    tokenizer = bpe_tokenizer(train.split("\n"), vocabulary)
    texts = {"train": train, "validation": validation, "test": test}
    changed = {
        f"{name}_attacked": attacked(texts[name], rate, seed) for name in ("validation", "test")
    }

    def ids(text: str) -> Tensor:
        encoded = tokenizer.backend_tokenizer.encode_batch(text.splitlines(keepends=True))
        return torch.tensor([i for line in encoded for i in line.ids], dtype=torch.int32)

    return {
        **{name: ids(text) for name, text in texts.items()},
        "tokenizer": tokenizer,
        "about": about,
        "words": {name: len(text.split()) for name, text in (texts | changed).items()},
        "attacked": {name: ids(text) for name, text in changed.items()},
    }


def _splits(folder: Path) -> tuple[str, str, str]:
    """Training and validation text, and how they were made."""
    held = _read(folder / "wiki.valid.tokens")
    if (folder / "wiki.train.tokens").is_file():
        return _read(folder / "wiki.train.tokens"), held, "WikiText-103, its three splits"
    lines = held.splitlines(keepends=True)
    cut = len(lines) * 9 // 10
    about = (
        "WikiText-103 without its training split, which is not here: trained on nine tenths of "
        "the validation split, validated on the last tenth, tested on the test split"
    )
    return "".join(lines[:cut]), "".join(lines[cut:]), about


def _read(path: Path) -> str:
    require(path.is_file(), f"{path} is not here", DataError)
    return path.read_text(encoding="utf-8")
