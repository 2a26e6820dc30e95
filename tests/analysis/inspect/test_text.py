"""Tokens, sequences, and the text that each token stands for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieline.analysis.inspect import text_sample
from tieline.core.errors import ParameterError
from tieline.models.demo import load_demo_tokenizer
from tieline.run.corpus import TokenisedText, tokenise
from tieline.trace import LayerFacts, LayerTrace, RoutingTrace

TOKENIZER = load_demo_tokenizer()
texts = st.text(min_size=1, max_size=60).filter(str.strip).filter(lambda t: t.isprintable())


class WithPrefix:
    """A tokenizer of one token per word that adds ids 7 and 8 before each text and 9 after it."""

    is_fast = True

    def __call__(self, text, add_special_tokens=True, **options):
        spans, start = [], 0
        for word in text.split(" "):
            spans.append((start, start + len(word)))
            start += len(word) + 1
        ids = [100 + len(word) for word in text.split(" ")]
        ids = [7, 8, *ids, 9] if add_special_tokens else ids
        return {"input_ids": ids, "offset_mapping": spans}


class Slow(WithPrefix):
    """The same without offsets."""

    is_fast = False

    def decode(self, ids):
        return f"<{ids[0]}>"


class Wandering(WithPrefix):
    """The same with an offset that returns to the start, as some normalisers produce."""

    def __call__(self, text, **options):
        encoding = super().__call__(text, **options)
        encoding["offset_mapping"][1:2] = [(0, 0)] * (len(encoding["offset_mapping"]) > 1)
        return encoding


def test_offsets_that_go_back_repeat_no_text():
    assert tokenise(Wandering(), "a bb ccc", 9, 8).pieces == ("a", "", " bb ccc")


@given(texts, st.integers(1, 9))
def test_pieces_give_the_text_back_and_sequences_hold_all_tokens(text, length):
    tokenised = tokenise(TOKENIZER, text, 10_000, length)
    assert "".join(tokenised.pieces) == text
    ids = [token for sequence in tokenised.sequences for token in sequence.tolist()]
    assert ids == TOKENIZER(text)["input_ids"]
    assert all(len(sequence) == length for sequence in tokenised.sequences[:-1])
    assert tokenised.tokens == len(ids) == len(tokenised.pieces)


def test_a_character_of_several_tokens_belongs_to_the_first():
    tokenised = tokenise(TOKENIZER, "a😀b", 99, 99)
    assert tokenised.pieces[:2] == ("a", "😀")
    assert tokenised.pieces[2:-1] == ("",) * (len(tokenised.pieces) - 3)
    assert tokenised.pieces[-1] == "b"


@pytest.mark.parametrize("tokens", [1, 5, 37, 300])
def test_a_long_text_is_cut_where_the_tokens_end(tokens):
    text = "def f(x): return x + 1\n" * 200
    tokenised = tokenise(TOKENIZER, text, tokens, 16)
    assert tokenised.tokens == tokens
    assert torch.cat(tokenised.sequences).tolist() == TOKENIZER(text)["input_ids"][:tokens]
    assert text.startswith("".join(tokenised.pieces))
    assert tokenised.characters == len("".join(tokenised.pieces))


def test_text_with_few_tokens_is_read_further():
    text = "-" * 4000  # long runs are few tokens
    assert tokenise(TOKENIZER, text, 100, 16).tokens == 100


def test_prefixes_start_every_sequence_and_count_as_tokens():
    tokenised = tokenise(WithPrefix(), "a bb ccc dddd eeeee", 9, 4)
    assert [s.tolist() for s in tokenised.sequences] == [[7, 8, 101, 102], [7, 8, 103, 104]]
    assert (tokenised.tokens, tokenised.prefix, tokenised.pieces) == (
        8,
        (7, 8),
        ("a", " bb", " ccc", " dddd"),
    )
    assert tokenise(Slow(), "a bb", 9, 8).pieces == ("<101>", "<102>")


@pytest.mark.parametrize(
    ("text", "tokens", "length", "message"),
    [
        ("", 4, 4, "text is empty"),
        (" \n ", 4, 4, "text is empty"),
        ("a", 0, 4, "at least one token"),
        ("a b", 4, 2, "more than the prefix"),
        ("a b", 2, 4, "leave none"),
    ],
)
def test_bad_input_is_refused(text, tokens, length, message):
    with pytest.raises(ParameterError, match=message):
        tokenise(WithPrefix(), text, tokens, length)


def trace_of(*gaps):
    """One layer per row of gaps; None for a layer with ids only."""
    tokens = len(next(row for row in gaps if row is not None))
    layers = []
    for index, row in enumerate(gaps):
        scores = None
        if row is not None:
            scores = torch.tensor([[gap, 0.0] for gap in row])
        experts = torch.zeros(tokens, 2, dtype=torch.int64) + torch.tensor([0, 1])
        layers.append(LayerTrace(f"layer {index}", LayerFacts(4, 1), experts, scores))
    positions = torch.arange(tokens)
    return RoutingTrace(tuple(layers), 100 + positions, torch.zeros_like(positions), positions)


def test_the_sample_shows_gaps_relative_to_the_median_of_each_layer():
    text = TokenisedText((torch.arange(3),), (7,), ("<script>", "b", "c"), 10)
    trace = trace_of([1.0, 2.0, 4.0, 2.0], [6.0, 3.0, 0.0, 3.0], None)
    sample = text_sample(trace, text)
    assert sample.layers == ("layer 0", "layer 1", "layer 2")
    assert sample.scales == (2.0, 3.0, None)
    assert [piece.text for piece in sample.pieces] == ["", "<script>", "b"]
    assert [piece.token for piece in sample.pieces] == [100, 101, 102]
    assert [piece.gaps for piece in sample.pieces] == [
        (0.5, 2.0, None),
        (1.0, 1.0, None),
        (2.0, 0.0, None),
    ]
    assert [piece.gap for piece in sample.pieces] == [0.5, 1.0, 0.0]
    assert len(text_sample(trace, text, most=2).pieces) == 2


def test_a_layer_that_always_ties_has_no_scale():
    text = TokenisedText((torch.arange(2),), (), ("a", "b"), 2)
    sample = text_sample(trace_of([0.0, 0.0]), text)
    assert sample.scales == (None,)
    assert sample.pieces[0].gap is None


def test_a_text_of_padding_alone_is_refused():
    """Its embeddings are zero, so that all scores are equal, whatever the router."""
    with pytest.raises(ParameterError, match=r"every token of the text is padding \(token 0\)"):
        tokenise(TOKENIZER, TOKENIZER.pad_token * 300, 128, 64)
    assert tokenise(TOKENIZER, TOKENIZER.pad_token + "a", 128, 64).tokens == 2
