"""tieline capture: traces of engines from the command line, and what it refuses."""

import json

import numpy as np
import pytest

from tests.engines.fakes import HONEST, fake_engine
from tieline.engines.engine_registry import list_engines
from tieline.trace import load_trace


@pytest.fixture
def ids(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(24).reshape(3, 8))
    return path


def test_the_trace_of_an_engine_is_saved_and_told(tieline, tmp_path, monkeypatch, ids):
    fake_engine(tmp_path, monkeypatch)
    arguments = ("capture", "model", "--engine", "fake", "--ids", ids, "-o", tmp_path / "trace")
    code, out, err = tieline(*arguments, "--json", "-")
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["tokens"], summary["documents"], summary["k"]) == (24, 3, 2)
    assert (summary["tied"], summary["off_scores"], summary["has_scores"]) == (0, 0, True)
    assert summary["versions"] == {"fake": "1"}
    assert load_trace(tmp_path / "trace").tokens.tolist() == list(range(24))


def test_transformers_runs_the_tokens_of_a_trace(tieline, tmp_path, monkeypatch, ids):
    fake_engine(tmp_path, monkeypatch)
    first, second = tmp_path / "first", tmp_path / "second"
    assert tieline("capture", "model", "--engine", "fake", "--ids", ids, "-o", first)[0] == 0
    code, out, err = tieline("capture", "--tokens-from", first, "-o", second)
    assert code == 0, err
    assert "transformers" in out
    assert load_trace(second).tokens.tolist() == load_trace(first).tokens.tolist()
    assert load_trace(second).documents.tolist() == load_trace(first).documents.tolist()


def test_choices_against_the_scores_are_saved_without_them(tieline, tmp_path, monkeypatch, ids):
    fake_engine(tmp_path, monkeypatch, HONEST.replace("np.argsort(-logits", "np.argsort(logits"))
    trace = tmp_path / "trace"
    arguments = ("capture", "model", "--engine", "fake", "--ids", ids, "-o", trace)
    code, _, err = tieline(*arguments)
    assert code == 2
    assert "72 choices are not the largest scores" in err
    assert not trace.exists()
    assert tieline(*arguments, "--no-scores")[0] == 0
    assert load_trace(trace).layers[0].scores is None


def test_an_engine_that_fails_leaves_nothing(tieline, tmp_path, monkeypatch, ids):
    fake_engine(tmp_path, monkeypatch, "def run(*_): raise ValueError('no such family')")
    trace = tmp_path / "new" / "trace"
    code, _, err = tieline("capture", "m", "--engine", "fake", "--ids", ids, "-o", trace)
    assert code == 2
    assert "error: fake: ValueError: no such family" in err
    assert not trace.parent.exists()


def test_wrong_words_are_refused_before_any_work(tieline, tmp_path, monkeypatch, ids):
    fake_engine(tmp_path, monkeypatch, "raise RuntimeError('started')")
    out = ("-o", tmp_path / "trace")
    for arguments, message in (
        (("--engine", "tgi", *out), "no engine is called 'tgi'"),
        (("--engine", "fake"), "with -o"),
        (("--engine", "fake", "--ids", ids, "--text", ids, *out), "exclude each other"),
        (("--engine", "fake", "--engine-python", tmp_path / "no", *out), "no such file"),
        (("--engine-defaults", *out), "other engines than transformers"),
        (("model.gguf", "--engine", "fake", *out), "name a model that has the same"),
    ):
        code, _, err = tieline("capture", *arguments)
        assert code == 2, arguments
        assert message in err
        assert "started" not in err


def test_engines_are_listed_with_how_to_install_them(tieline, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = tieline("capture", "--list-engines")
    assert code == 0, err
    for text in ("transformers", "llama.cpp", "vllm", "mlx", "not found", "$VENV/bin/pip install"):
        assert text in out
    long = [line for engine in list_engines().engines if engine.folder for line in engine.install]
    assert max(map(len, long)) > 80
    assert set(long) - {""} <= set(out.splitlines()), "a command that is cut cannot be copied"
    code, out, _ = tieline("capture", "--list-engines", "--json", "-")
    pythons = {engine["name"]: engine["python"] for engine in json.loads(out)["engines"]}
    assert pythons["vllm"] == ""
    assert pythons["transformers"]


def test_commands_that_install_are_never_cut(tieline, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, shown, _ = tieline("capture", "--list-engines")
    lines = shown.splitlines()
    commands = [
        line for engine in list_engines().engines if engine.folder for line in engine.install
    ]
    assert max(map(len, commands)) > 100
    assert set(commands) <= set(lines)
