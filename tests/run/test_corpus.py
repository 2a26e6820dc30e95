"""Texts cut into tokens: tokenizers that fail, and ids that a model has no row for."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest

import tieline
from tieline.core.errors import ParameterError, TielineError
from tieline.models.demo import DEMO_FOLDER, demo_text
from tieline.models.model import Model
from tieline.run.corpus import Corpus, text_and_origin, tokenise


class Panic(BaseException):
    """Stands for what a library in Rust raises."""


Panic.__name__ = "PanicException"


def test_a_tokenizer_that_panics_is_refused_in_one_sentence():
    class Panicking:
        is_fast = False

        def __call__(self, text, **options):
            raise Panic("called `Result::unwrap()` on an `Err` value: retry-limit-in-match over")

    with pytest.raises(TielineError, match=r"the tokenizer fails on this text: .*retry-limit"):
        tokenise(Panicking(), "a text", 8, 8)


def test_a_regex_that_panics_is_refused(tmp_path):
    content = json.loads((DEMO_FOLDER / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
    before = content["pre_tokenizer"]
    both = [split | {"invert": False}, before]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TielineError, match="the tokenizer fails on this text"):
        tieline.inspect(folder, text="x" * 4000, tokens=64)


def test_ids_beyond_the_embedding_are_refused_with_both_numbers(tmp_path):
    content = json.loads((DEMO_FOLDER / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": 600, "content": "zqx", **flags})
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for run in (tieline.inspect, tieline.audit, tieline.smooth):
        with pytest.raises(TielineError, match=r"token id (512|600) is none .* has 512 rows"):
            run(folder, text="a zqx in a text, " * 60, tokens=64)


@pytest.mark.parametrize("tokens", [1, 9, 700, 4000, 10**9])
def test_tokens_of_a_beginning_are_those_of_the_whole_text(tokens, tokenizer):
    text = demo_text()[:20_000]
    every = tokenizer(text, add_special_tokens=False)["input_ids"]
    sequences = tokenise(tokenizer, text, tokens, 64).sequences
    ids = [int(token) for sequence in sequences for token in sequence]
    assert ids == every[:tokens]


@pytest.fixture(scope="module")
def tokenizer():
    return Model.open("demo").tokenizer


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs the devices of Unix")
def test_what_has_no_end_or_cannot_be_read_is_refused_by_name_and_not_kept():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for endless in ("/dev/zero", "/dev/urandom"):
        with pytest.raises(TielineError, match=f"{endless}: is a device, where a file is needed"):
            text_and_origin(Path(endless))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    with pytest.raises(TielineError, match="/proc/self/mem: input/output error"):
        text_and_origin(Path("/proc/self/mem"))


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs the open files of Unix")
def test_a_named_pipe_is_refused_and_one_that_is_open_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TielineError, match=r"pipe: is a named pipe, where a file is needed"):
        text_and_origin(tmp_path / "pipe")  # waited for whoever would write to it
    reading, writing = os.pipe()
    os.write(writing, b"a text")
    os.close(writing)
    assert text_and_origin(Path(f"/dev/fd/{reading}"))[0] == "a text"
    os.close(reading)


def test_the_name_of_a_file_is_not_taken_for_a_text(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("Once upon a time")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParameterError, match=r"'mine.txt' is a file, .* give Path\('mine.txt'\)"):
        Corpus(text="mine.txt").origin  # noqa: B018
    assert text_and_origin(Path("mine.txt")) == ("Once upon a time", "mine.txt")
    for text in ("mine", "a\0b", "a" * 5000, ""):
        assert text_and_origin(text) == (text, "")
