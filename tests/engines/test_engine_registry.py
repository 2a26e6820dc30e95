"""Where engines are looked for, what is refused, and that every record can be followed."""

import sys

import pytest

from tests.engines.fakes import fake_engine
from tieline.core.errors import ParameterError
from tieline.engines import ENGINES, engine_named, find_python, installed_engine, register_engine
from tieline.engines.engine_registry import (
    check_engine_model,
    environment_of,
    split_engine_source,
)


def test_all_engines_have_a_worker_and_commands():
    assert set(ENGINES) >= {"vllm", "mlx", "llama.cpp"}
    for engine in ENGINES.values():
        assert engine.worker.is_file()
        assert any("$VENV/bin/pip install" in line for line in engine.install)
        assert engine.formats[0] == "fp32"


def test_a_name_is_taken_once(tmp_path, monkeypatch):
    record = fake_engine(tmp_path, monkeypatch)
    with pytest.raises(ParameterError, match="already"):
        register_engine(record)
    with pytest.raises(ParameterError, match=r"no engine is called 'tgi'.*transformers.*vllm"):
        engine_named("tgi")


def test_a_side_of_an_engine_that_does_not_exist_names_those_that_do(tmp_path, monkeypatch):
    assert split_engine_source("vllm:demo") == ("vllm", "demo")
    for source in ("demo", "C:\\models\\a", "http://localhost:8000", 7):
        assert split_engine_source(source) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:2").touch()
    assert split_engine_source("run:2") is None
    for source in ("llamacpp:a.gguf", "transformers:demo", "run:3"):
        name = source.partition(":")[0]
        with pytest.raises(ParameterError, match=rf"called '{name}'; there are .*llama\.cpp"):
            split_engine_source(source)


def test_a_model_that_is_nowhere_is_refused_before_anything_runs(tmp_path, monkeypatch):
    gguf = fake_engine(tmp_path, monkeypatch, name="files", gguf=True)
    folders = fake_engine(tmp_path, monkeypatch)
    (tmp_path / "a.gguf").touch()
    check_engine_model(gguf, tmp_path / "a.gguf")
    for name in (tmp_path, "demo", "org/model-1.5_b"):
        check_engine_model(folders, name)
    with pytest.raises(ParameterError, match=r"files: no such file: b\.gguf"):
        check_engine_model(gguf, "b.gguf")
    for name in (tmp_path / "none", "./none", "../a/b", "a/b/c", tmp_path / "a.gguf"):
        with pytest.raises(ParameterError, match="fake: no such folder: "):
            check_engine_model(folders, name)


def test_the_python_asked_for_comes_first(tmp_path, monkeypatch):
    record = fake_engine(tmp_path, monkeypatch)
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    assert find_python(record, other) == other
    assert str(find_python(record)) == sys.executable
    monkeypatch.delenv("TIELINE_FAKE_PYTHON")
    assert str(find_python(record)) == sys.executable  # numpy is in this Python


def test_the_cached_folder_comes_before_this_python(tmp_path, monkeypatch):
    record = fake_engine(tmp_path, monkeypatch)
    monkeypatch.delenv("TIELINE_FAKE_PYTHON")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached_python = record.folder / "bin" / "python"
    cached_python.parent.mkdir(parents=True)
    cached_python.touch()
    assert find_python(record) == cached_python


def test_what_cannot_be_a_python_is_refused(tmp_path, monkeypatch):
    record = fake_engine(tmp_path, monkeypatch)
    plain = tmp_path / "notes.txt"
    plain.write_text("no program")
    for wrong, message in ((tmp_path / "none", "no such file"), (plain, "not a program")):
        with pytest.raises(ParameterError, match=message):
            find_python(record, wrong)
    with pytest.raises(ParameterError, match="not a program"):
        find_python(record, tmp_path)


def test_an_engine_that_is_not_there_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for engine in ENGINES.values():
        monkeypatch.delenv(engine.variable, raising=False)
        with pytest.raises(ParameterError, match="--list-engines"):
            find_python(engine)
        assert installed_engine(engine).python == ""


def test_versions_are_those_of_the_engines_python(tmp_path, monkeypatch):
    import numpy as np

    record = fake_engine(tmp_path, monkeypatch)
    assert installed_engine(record).versions == {"numpy": np.__version__}


def test_our_module_path_stays_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    record = fake_engine(
        tmp_path, monkeypatch, environment={"A": "{venv}/lib", "B": "{venv}", "C": "x"}
    )
    python = tmp_path / "bin" / "python"
    environment = environment_of(record, python)
    assert "PYTHONPATH" not in environment
    assert "A" not in environment  # there is no such folder
    assert (environment["B"], environment["C"]) == (str(tmp_path), "x")
    monkeypatch.setenv("C", "mine")
    assert environment_of(record, python)["C"] == "mine"
