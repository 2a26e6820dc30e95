"""Text to token ids: windows, tokenizers, the attack, the splits."""

import hashlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.training.real_data import shared
from tieline.core.errors import TielineError
from tieline.lab.training import data_files
from tieline.lab.training.config import DataConfig
from tieline.lab.training.text_data import (
    LETTERS,
    Windows,
    attacked_text,
    bpe_tokenizer,
    byte_tokenizer,
    clean_article,
    letter_tokenizer,
    load_streams,
    text8_ids,
)

BYTES = byte_tokenizer()
STREAM = torch.arange(100, dtype=torch.uint8)


def test_windows_are_pieces_of_the_stream_drawn_by_the_seed():
    windows, same, other = (Windows(STREAM, context=5, length=40, seed=s) for s in (1, 1, 2))
    firsts = []
    for i in range(40):
        ids = windows[i]["input_ids"]
        assert ids.tolist() == list(range(int(ids[0]), int(ids[0]) + 5))
        assert torch.equal(windows[i]["labels"], ids)
        assert torch.equal(ids, same[i]["input_ids"])
        firsts.append(int(ids[0]))
    assert firsts != [int(other[i]["input_ids"][0]) for i in range(40)]
    assert len(set(firsts)) > 20


def test_the_last_window_of_a_stream_can_be_drawn():
    starts = {
        int(Windows(STREAM[:6], context=5, length=64, seed=0)[i]["input_ids"][0]) for i in range(64)
    }
    assert starts == {0, 1}


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(TielineError, match="windows of 101 tokens do not fit"):
        Windows(STREAM, context=101, length=1, seed=0)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40))
def test_bytes_are_their_own_ids_and_any_text_comes_back(text):
    ids = BYTES(text)["input_ids"]
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


def test_a_bpe_has_the_size_that_was_asked_for_and_loses_nothing():
    text = "the cat sat on the mat\nthe dog – ünïcode – sat on the log\n" * 20
    tokenizer = bpe_tokenizer(text.split("\n"), 300)
    assert len(tokenizer) <= 300
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()) / 2


def test_letters():
    tokenizer = letter_tokenizer(LETTERS)
    assert tokenizer("ab z")["input_ids"] == [1, 2, 0, 26]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9))
def test_the_attack_replaces_words_and_nothing_else(seed):
    text = " = Title = \n\n word one two three \n" * 50
    changed = attacked_text(text, 0.3, seed)
    assert changed.count("\n") == text.count("\n")
    before, after = text.split(), changed.split()
    assert len(before) == len(after)
    assert all(new in (old, "AAA") for old, new in zip(before, after, strict=True))
    assert 0.15 < after.count("AAA") / len(after) < 0.45
    assert attacked_text(text, 0.0, seed) == text
    assert attacked_text(text, 1.0, seed).split() == ["AAA"] * len(before)


def test_an_attack_rate_beyond_one_is_refused():
    with pytest.raises(TielineError, match="rate"):
        attacked_text("a", 1.5, 0)


ARTICLE = """<page><text xml:space="preserve">'''Ant 9''' is [[the insect|an ant]]
&lt;ref&gt;x&lt;/ref&gt; {{box|a=1}} of [[Category:Ants]] 1999.</text></page>
<page><text xml:space="preserve">#REDIRECT [[Bee]]</text></page>"""


def test_articles_become_letters_and_single_spaces(tmp_path):
    file = tmp_path / "raw"
    file.write_text(ARTICLE)
    ids = text8_ids(file)
    assert "".join(LETTERS[i] for i in ids) == "ant nine is an ant x of one nine nine nine"
    assert clean_article("A  B") == "a b"


def test_the_text_in_the_box_is_split_without_overlap():
    streams = load_streams(DataConfig(name="demo"))
    splits = [streams.train, streams.validation, streams.test]
    total = sum(part.numel() for part in splits)
    assert splits[1].numel() == splits[2].numel() == total // 10
    text = torch.cat(splits)
    assert streams.tokenizer.decode(text[:200].tolist()) in streams.tokenizer.decode(text.tolist())


def test_an_unknown_text_is_refused():
    with pytest.raises(TielineError, match="'nothing' is not one of the texts"):
        load_streams(DataConfig(name="nothing"))


def test_wikitext_without_its_training_split_says_so():
    folder = shared("wikitext-103")
    streams = load_streams(DataConfig(name="wikitext"))
    assert "without its training split" in streams.about
    beginning = streams.tokenizer.decode(streams.test[:400].tolist())
    assert (folder / "wiki.test.tokens").read_text(encoding="utf-8").startswith(beginning)
    assert streams.word_counts["test"] == streams.word_counts["test_attacked"] == 241_211
    assert streams.attacked["test_attacked"].numel() > streams.test.numel()


def test_data_that_are_not_here_are_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
    with pytest.raises(data_files.DataError, match="put its files into"):
        data_files.data_set("no-such-set")


def test_data_are_found_in_the_named_folder_then_in_the_cache(monkeypatch, tmp_path):
    cache, chosen_folder = tmp_path / "cache", tmp_path / "named"
    monkeypatch.setattr(data_files, "cache_folder", lambda name: cache / name)
    monkeypatch.delenv("TIELINE_DATA", raising=False)
    assert data_files.data_folder() == cache / "data"
    (cache / "data" / "set").mkdir(parents=True)
    monkeypatch.setenv("TIELINE_DATA", str(chosen_folder))
    assert data_files.data_folder() == chosen_folder
    assert data_files.data_set("set") == cache / "data" / "set"
    (chosen_folder / "set").mkdir(parents=True)
    assert data_files.data_set("set") == chosen_folder / "set"
    assert data_files.find_data("other") == chosen_folder / "other"


def test_what_is_kept_is_checked_by_hash_and_made_once(monkeypatch, tmp_path):
    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
    right = data_files.DataFile("set", hashlib.sha256(b"data").hexdigest(), 4)
    calls = []

    def make():
        calls.append(1)
        return b"data"

    path = data_files.cached_file(right, make)
    assert path.read_bytes() == b"data"
    assert data_files.cached_file(right, make) == path
    assert calls == [1]
    path.write_bytes(b"tampered")
    assert data_files.cached_file(right, make).read_bytes() == b"data"
    with pytest.raises(data_files.DataError, match="SHA-256"):
        data_files.cached_file(replace(right, name="other"), lambda: b"wrong")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set"]


def test_only_https_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
    with pytest.raises(data_files.DataError, match="https"):
        data_files.fetch_file(data_files.DataFile("hosts", "0" * 64, 1, "file:///etc/hosts"))


def test_a_server_that_is_not_there_is_told_with_the_way_round(monkeypatch, tmp_path):
    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
    with pytest.raises(data_files.DataError, match="put the file into"):
        data_files.fetch_file(data_files.DataFile("x", "0" * 64, 1, "https://127.0.0.1:9/x"))
