"""What is routed: a text, cut into sequences of tokens and batches of these.

corpus = Corpus(text, tokens=4096, batch_size=4)
routed = corpus.tokenised(tokenizer, model)
routed.sequences, routed.digest, corpus.batches(routed)
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.core.errors import ParameterError, TielineError, first_line, is_panic, require
from tieline.core.files import file_kind_text, is_open_file, require_file
from tieline.models.configuration import text_config
from tieline.models.demo import DEMO, demo_text

Text = str | Path | None
"""A text itself, a file that holds one, or None for the text in the box."""

STDIN, MOST_TEXT = Path("-"), 1 << 30
"""The name of stdin as a file of text, and the bytes of the longest text that is read."""

LONGEST = 512
"""Tokens per sequence where nothing else is asked for and the model takes as many."""

PROBE_CHARACTERS = 4096
"""Text that is cut first, to see how much of it the tokens need."""


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

    @property
    def digest(self) -> str:
        """SHA-256 of the text that the tokens cover."""
        return hashlib.sha256("".join(self.pieces).encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """What is routed, and in which batches.

    Attributes:
        text: the text itself, the Path of a file, or None for the text in the box.
        tokens: how many tokens of it.
        sequence_length: tokens per sequence; by default 512, or what the model takes if less.
        batch_size: sequences per forward pass.
        seed: seed of whatever is drawn on this corpus.
    """

    text: Text = None
    tokens: int = 16384
    sequence_length: int | None = None
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")

    @cached_property
    def _read(self) -> tuple[str, str]:
        """The text, and where it is from."""
        return text_and_origin(self.text)

    @property
    def origin(self) -> str:
        """Where the text is from: "demo", the name of a file, or nothing."""
        return self._read[1]

    def length(self, model: nn.Module) -> int:
        """Tokens per sequence for a model."""
        return self.sequence_length or default_sequence_length(model)

    def tokenised(self, tokenizer: Any, model: nn.Module) -> TokenisedText:
        """Cut the text into sequences of tokens."""
        text = tokenise(tokenizer, self._read[0], self.tokens, self.length(model))
        check_token_ids(model, text.sequences)
        return text

    def batches(self, text: TokenisedText) -> list[Int[Tensor, "rows length"]]:
        """Stack neighbouring sequences of equal length, at most `batch_size` at a time."""
        return self.stacked(text.sequences)

    def stacked(self, sequences: Sequence[Int[Tensor, " _"]]) -> list[Int[Tensor, "rows length"]]:
        """Stack some of the sequences."""
        return list(stacked_batches(sequences, self.batch_size))

    def split(
        self, tokenizer: Any, model: nn.Module, first: int
    ) -> tuple[list[Int[Tensor, " _"]], list[Int[Tensor, " _"]]]:
        """Return the sequences of the first tokens, and those of `tokens` tokens that follow.

        Args:
            tokenizer: the tokenizer.
            model: the model that they are for.
            first: tokens before the split; sequences are not longer than that.
        """
        length = min(self.length(model), first, self.tokens)
        text = tokenise(tokenizer, self._read[0], first + self.tokens, length)
        check_token_ids(model, text.sequences)
        count = -(-first // length)
        require(
            len(text.sequences) > count,
            f"the text has {text.tokens} tokens: too few to choose ε on {first} of them and to "
            "measure on others",
        )
        return list(text.sequences[:count]), list(text.sequences[count:])


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
    with _explained_tokenizer():
        prefix = _tokenizer_prefix(tokenizer)
        ids, pieces = _encode_at_least(tokenizer, text, tokens)
    body = length - len(prefix)
    require(body >= 1, f"sequences need more than the prefix, got length={length}, {prefix=}")
    require(len(ids) > 0, "the tokenizer makes no token of the text")
    count = _text_tokens_without_prefixes(tokens, length, len(prefix))
    ids, pieces = ids[:count], pieces[:count]
    padding = getattr(tokenizer, "pad_token_id", None)
    require(
        any(token != padding for token in ids),
        f"every token of the text is padding (token {padding}): there is nothing to route",
    )
    rows = [[*prefix, *ids[start : start + body]] for start in range(0, len(ids), body)]
    sequences = tuple(torch.tensor(row, device="cpu") for row in rows)
    return TokenisedText(sequences, prefix, tuple(pieces), sum(map(len, pieces)))


@contextmanager
def _explained_tokenizer() -> Iterator[None]:
    """Turn whatever a tokenizer raises on a text, also a panic, into one message."""
    try:
        yield
    except TielineError:
        raise
    except BaseException as problem:
        if not isinstance(problem, Exception) and not is_panic(problem):
            raise
        raise ParameterError(
            f"the tokenizer fails on this text: {first_line(problem)}"
        ) from problem


def check_token_ids(model: nn.Module, sequences: Sequence[Int[Tensor, " _"]]) -> None:
    """Refuse token ids for which the embedding of a model has no row."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", None)
    if not isinstance(rows, int):
        return
    largest = max(int(ids.max()) for ids in sequences)
    least = min(int(ids.min()) for ids in sequences)
    require(
        least >= 0 and largest < rows,
        f"the token id {largest if largest >= rows else least} is none of the model, whose "
        f"embedding has {rows} rows: its tokenizer, or the ids, belong to another model",
    )


def token_texts(text: TokenisedText) -> list[str]:
    """The part of the text that each token stands for, over all sequences; empty for a prefix."""
    pieces, start = iter(text.pieces), len(text.prefix)
    return [
        next(pieces, "") if position >= start else ""
        for sequence in text.sequences
        for position in range(len(sequence))
    ]


def _tokenizer_prefix(tokenizer: Any) -> tuple[int, ...]:
    """Special tokens that the tokenizer puts before every text."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer("a", verbose=False)["input_ids"]
    first = next((position for position, token in enumerate(full) if token == bare[0]), 0)
    return tuple(full[:first])


def _encode_at_least(tokenizer: Any, text: str, tokens: int) -> tuple[list[int], list[str]]:
    """Ids and pieces of at least `tokens` tokens, or of the whole text."""
    size = PROBE_CHARACTERS
    while True:
        beginning = text[:size]
        ids, pieces = _tokens_and_text_parts(tokenizer, beginning)
        if len(beginning) == len(text) or len(ids) > tokens + 8:  # a cut may change the last few
            return ids, pieces
        needed = 1.25 * (tokens + 9) * size / max(1, len(ids))
        size = max(2 * size, int(needed))


def _tokens_and_text_parts(tokenizer: Any, text: str) -> tuple[list[int], list[str]]:
    """Ids of all tokens of a text, and the part of the text that each stands for."""
    is_fast = bool(getattr(tokenizer, "is_fast", False))
    encoding = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=is_fast, verbose=False
    )
    ids = list(encoding["input_ids"])
    if not is_fast:
        return ids, [tokenizer.decode([token]) for token in ids]
    # a character of several tokens belongs to the first, skipped ones to the token that follows
    ends = list(accumulate((end for _, end in encoding["offset_mapping"]), max))
    return ids, [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _text_tokens_without_prefixes(tokens: int, length: int, prefix: int) -> int:
    """Number of text tokens in `tokens`, each sequence of `length` spending some on its prefix."""
    full, rest = divmod(tokens, length)
    tail = max(0, rest - prefix)
    text_tokens = full * (length - prefix) + tail
    if text_tokens < 1:
        raise ParameterError(f"{tokens} tokens leave none beside a prefix of {prefix}")
    return text_tokens


def text_and_origin(text: Text) -> tuple[str, str]:
    """The text, and where it is from: "demo", the name of a file, or nothing."""
    if text is None:
        return demo_text(), DEMO
    if isinstance(text, Path):
        return _read_text_file(text), "stdin" if text == STDIN else text.name
    require(isinstance(text, str), f"a text is a str or the Path of a file, got {text!r:.80}")
    require(
        not os.path.isfile(text),
        f"{text!r:.200} is a file, and a str is the text itself: give Path({text!r:.200})",
    )
    return text, ""


def _read_text_file(path: Path) -> str:
    """The text in a file, a pipe or, for `Path("-")`, stdin."""
    if path == STDIN:
        data = _text_bytes(sys.stdin.buffer, path)
    else:
        _require_text_file(path)
        with path.open("rb") as file:
            data = _text_bytes(file, path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ParameterError(
            f"{path} is not UTF-8 text: byte {data[problem.start]:#04x} at offset {problem.start}"
        ) from problem
    require(bool(text.strip()), f"{path} is empty: there is nothing to route")
    return text


def _require_text_file(path: Path) -> None:
    """Refuse what is no file; a pipe that this process was given open, as `<(...)`, is read."""
    require(path.exists(), f"no such file: {path}")
    if not (is_open_file(path) and file_kind_text(path) == "a named pipe"):
        require_file(path, ParameterError)


def _text_bytes(stream: BinaryIO, path: Path) -> bytearray:
    """The bytes of a text; those of something else, which may have no end, are not kept."""
    data = bytearray()
    try:
        while block := stream.read(1 << 20):
            require(b"\0" not in block, f"{path} is a binary file, not text")
            data += block
            most = f"{path} has more than {MOST_TEXT >> 20} MiB: too long a text"
            require(len(data) <= MOST_TEXT, most)
    except OSError as problem:  # of a read, which does not name its file
        raise ParameterError(f"{path}: {(problem.strerror or str(problem)).lower()}") from problem
    return data


def default_sequence_length(model: nn.Module, longest: int = LONGEST) -> int:
    """Tokens per sequence: `longest`, or what the model takes if that is less."""
    most = getattr(text_config(model), "max_position_embeddings", None)
    return min(longest, most) if isinstance(most, int) and most > 1 else longest


def stacked_batches(
    sequences: Sequence[Int[Tensor, " _"]], batch_size: int
) -> Iterator[Int[Tensor, "rows length"]]:
    """Stack neighbouring sequences of equal length, at most `batch_size` at a time."""
    rows: list[Tensor] = []
    for sequence in sequences:
        if rows and (len(rows) == batch_size or len(sequence) != len(rows[0])):
            yield torch.stack(rows)
            rows = []
        rows.append(sequence)
    if rows:
        yield torch.stack(rows)


def first_sequences(text: TokenisedText, most: int) -> list[Tensor]:
    """Return the first sequences with at most `most` tokens, or the beginning of the first one."""
    sequences, n_tokens = [], 0
    for sequence in text.sequences:
        if n_tokens + len(sequence) > most:
            break
        sequences.append(sequence)
        n_tokens += len(sequence)
    return sequences or [text.sequences[0][:most]]
