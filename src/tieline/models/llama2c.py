"""Read checkpoints of llama2.c: a Llama and its vocabulary in two flat files.

model.bin       seven int32 (dim, hidden dim, layers, heads, key heads, vocabulary, positions),
                then float32 tensors one after the other; a negative vocabulary says that the output
                matrix is a tensor of its own, at the end
tokenizer.bin   int32 length of the longest piece, then per piece a float32 score, an int32 length
                and its bytes

Sizes are checked against the length of the file. Queries and keys rotate neighbouring coordinates
there and halves in transformers: their rows are reordered.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tieline.core.errors import UnsupportedModelError, require

LARGEST = 1 << 20  # of any number in a header
UNKNOWN, BEGIN, END, FIRST_BYTE = 0, 1, 2, 3


@dataclass(frozen=True)
class Header:
    """The seven numbers at the head of a model; `own_output` is the vocabulary's sign."""

    dim: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    positions: int
    own_output: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors in the order of the file."""
        d, h, n = self.dim, self.hidden, self.layers
        keys = d // self.heads * self.key_heads
        turns = (self.positions, d // self.heads // 2)
        shapes = {"embed": (self.vocabulary, d), "att_norm": (n, d)}
        shapes |= {"q": (n, d, d), "k": (n, keys, d), "v": (n, keys, d), "o": (n, d, d)}
        shapes |= {"ffn_norm": (n, d), "gate": (n, h, d), "down": (n, d, h), "up": (n, h, d)}
        shapes |= {"norm": (d,), "cosines": turns, "sines": turns}
        return shapes | ({"output": (self.vocabulary, d)} if self.own_output else {})


def read_header(path: str | Path) -> Header:
    """Read the header of a model file; refuses numbers that are no Llama or do not fit the file."""
    with Path(path).open("rb") as file:
        head = file.read(28)
    require(len(head) == 28, f"{path}: {len(head)} bytes are no llama2.c model", _BAD)
    d, h, n, heads, keys, vocabulary, positions = struct.unpack("<7i", head)
    header = Header(d, h, n, heads, keys, abs(vocabulary), positions, own_output=vocabulary < 0)
    numbers = (d, h, n, heads, keys, header.vocabulary, positions)
    if not (
        all(0 < number <= LARGEST for number in numbers)
        and header.dim % (2 * header.heads) == 0
        and header.heads % header.key_heads == 0
    ):
        raise _BAD(f"{path}: {numbers} are not the sizes of a Llama")
    expected = 28 + 4 * sum(math.prod(shape) for shape in header.shapes.values())
    length = Path(path).stat().st_size
    require(length == expected, f"{path} has {length} bytes, its header asks for {expected}", _BAD)
    return header


def load_llama2c(path: str | Path) -> LlamaForCausalLM:
    """Load the model in float32, in evaluation mode."""
    header = read_header(path)
    numbers = np.fromfile(path, dtype="<f4", offset=28)
    parts = np.split(numbers, np.cumsum([math.prod(s) for s in header.shapes.values()])[:-1])
    tensors = {
        name: torch.from_numpy(part.astype(np.float32).reshape(shape))
        for (name, shape), part in zip(header.shapes.items(), parts, strict=True)
    }
    finite = all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    require(finite, f"{path}: weights are not finite", _BAD)
    model = LlamaForCausalLM(_config(header))
    missing = model.load_state_dict(_state(header, tensors), strict=False)
    left = [key for key in missing.missing_keys if key != "lm_head.weight"]
    assert not left, left
    assert not missing.unexpected_keys, missing.unexpected_keys
    model.tie_weights()
    return model.eval()


def _config(header: Header) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=header.vocabulary,
        hidden_size=header.dim,
        intermediate_size=header.hidden,
        num_hidden_layers=header.layers,
        num_attention_heads=header.heads,
        num_key_value_heads=header.key_heads,
        max_position_embeddings=header.positions,
        rms_norm_eps=1e-5,
        bos_token_id=BEGIN,
        eos_token_id=END,
        tie_word_embeddings=not header.own_output,
    )


def _state(header: Header, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of transformers."""
    state = {"model.embed_tokens.weight": tensors["embed"], "model.norm.weight": tensors["norm"]}
    if header.own_output:
        state["lm_head.weight"] = tensors["output"]
    names = {"att_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {letter: f"self_attn.{letter}_proj" for letter in "qkvo"}
    names |= {which: f"mlp.{which}_proj" for which in ("gate", "up", "down")}
    for layer in range(header.layers):
        for short, name in names.items():
            tensor = tensors[short][layer]
            if short in ("q", "k"):
                tensor = _halves(tensor, header.heads if short == "q" else header.key_heads)
            state[f"model.layers.{layer}.{name}.weight"] = tensor
    return state


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head with the even coordinates first, then the odd ones."""
    pairs = weight.view(heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape_as(weight).contiguous()


def load_llama2c_tokenizer(path: str | Path, vocabulary: int) -> PreTrainedTokenizerFast:
    """Load the vocabulary as a byte-pair encoding that falls back to bytes.

    Args:
        path: tokenizer.bin.
        vocabulary: number of pieces, from the model's header.
    """
    pieces = _pieces(Path(path), vocabulary)
    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    require(len(ids) == vocabulary, f"{path}: two pieces are the same", _BAD)
    bpe = BPE(
        ids, _merges(pieces, ids), unk_token=pieces[UNKNOWN][0], byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Prepend(" ")  # type: ignore[assignment]
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    begin = pieces[BEGIN][0]
    tokenizer.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single=[f"{begin}:0", "$A:0"], special_tokens=[(begin, BEGIN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=pieces[UNKNOWN][0],
        bos_token=begin,
        eos_token=pieces[END][0],
    )


def _pieces(path: Path, vocabulary: int) -> list[tuple[str, float]]:
    """Pieces and scores by id; refuses bytes that are not UTF-8."""
    raw, place, pieces = path.read_bytes(), 4, []
    require(len(raw) >= 4, f"{path}: {len(raw)} bytes are no vocabulary", _BAD)
    longest = struct.unpack_from("<i", raw)[0]
    for number in range(vocabulary):
        fits = place + 8 <= len(raw)
        score, length = struct.unpack_from("<fi", raw, place) if fits else (0.0, -1)
        place += 8
        if not (0 < length <= max(longest, 16) and place + length <= len(raw)):
            raise _BAD(f"{path}: piece {number} of {vocabulary} is not there")
        pieces.append((_text(raw[place : place + length], path, number), score))
        place += length
    require(place == len(raw), f"{path}: {len(raw) - place} bytes after {vocabulary} pieces", _BAD)
    return pieces


def _text(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as problem:
        message = f"{path}: piece {number} is no UTF-8: {raw[:16]!r}"
        raise UnsupportedModelError(message) from problem


def _merges(pieces: list[tuple[str, float]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, in order of the third's score."""
    found = []
    for number, (piece, score) in enumerate(pieces):
        if number < FIRST_BYTE + 256:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((-score, number, ids[left], ids[right], (left, right)))
    return [pair for *_, pair in sorted(found)]


_BAD = UnsupportedModelError
