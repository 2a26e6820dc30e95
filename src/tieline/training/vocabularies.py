"""Tokenizers of the texts: bytes, letters, and a byte-level BPE."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = ["bpe_tokenizer", "byte_tokenizer", "letter_tokenizer"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte of UTF-8 is the token of its own value."""
    found = Tokenizer(models.BPE(vocab={c: b for b, c in bytes_to_unicode().items()}, merges=[]))
    return _byte_level(found)


def bpe_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `vocabulary` tokens, learnt from `texts`; any text is kept without loss."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(texts, learner)
    found.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=found)


def letter_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    """Every letter is a token; others are unknown."""
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=letters[0]))
    found.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=found)


def _byte_level(found: Tokenizer) -> PreTrainedTokenizerFast:
    found.pre_tokenizer = pre_tokenizers.ByteLevel(  # type: ignore[assignment]
        add_prefix_space=False, use_regex=False
    )
    found.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=found)
