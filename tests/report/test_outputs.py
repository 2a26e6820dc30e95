"""A run's files: refused before the work, made before the first is written, whole or absent."""

import json

import pytest

from tests.report.zoo import make_trace
from tieline.core import files
from tieline.core.errors import ParameterError
from tieline.report import outputs
from tieline.report.outputs import Outputs, to_json
from tieline.trace.store import load_trace


class Killed(BaseException):
    """The process dies here."""


@pytest.fixture(scope="module")
def trace():
    return make_trace()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(outputs, "page_bytes", lambda result: b"page")
    monkeypatch.setattr(outputs, "figure_bytes", lambda result, path: b"figure")


def wanted(folder):
    names = (folder / "a.html", str(folder / "a.json"), folder / "a.pdf", folder / "trace")
    return Outputs(*names)


def complete(result, folder):
    expected = {"a.html": b"page", "a.json": to_json(result).encode(), "a.pdf": b"figure"}
    for path in folder.iterdir():
        if path.name == "trace":
            load_trace(path)
        elif not path.name.startswith("."):
            assert path.read_bytes() == expected[path.name]
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_all_files_are_written_and_listed(result, trace, tmp_path):
    chosen = wanted(tmp_path)
    chosen.check()
    chosen.write(result, trace)
    assert complete(result, tmp_path) == {"a.html", "a.json", "a.pdf", "trace"}
    assert [path.name for path in chosen.files] == ["a.html", "a.json", "a.pdf", "trace"]
    assert load_trace(tmp_path / "trace").n_tokens == trace.n_tokens


def test_json_on_stdout_is_no_file():
    assert Outputs(json="-").files == []
    assert Outputs(json="-").to_stdout
    assert not Outputs(json="a.json").to_stdout


@pytest.mark.parametrize("step", range(8))
def test_a_run_that_dies_at_any_step_leaves_complete_files_or_none(
    result, trace, tmp_path, monkeypatch, step
):
    left = iter([*range(step), None])

    def dies(real):
        def run(*args, **kwargs):
            if next(left, None) is None:
                raise Killed
            return real(*args, **kwargs)

        return run

    monkeypatch.setattr(outputs, "save_trace", dies(outputs.save_trace))
    monkeypatch.setattr(files.os, "fsync", dies(files.os.fsync))
    monkeypatch.setattr(files.Path, "replace", dies(files.Path.replace))
    with pytest.raises(Killed):
        wanted(tmp_path).write(result, trace)
    complete(result, tmp_path)


def test_nothing_is_written_if_one_of_the_files_cannot_be_made(
    result, trace, tmp_path, monkeypatch
):
    def fails(result, path):
        raise ParameterError("no gaps")

    monkeypatch.setattr(outputs, "figure_bytes", fails)
    with pytest.raises(ParameterError, match="no gaps"):
        wanted(tmp_path).write(result, trace)
    assert list(tmp_path.iterdir()) == []


def test_bad_places_are_refused_before_the_work(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    page = tmp_path / "a.html"
    for chosen, words in (
        (Outputs(tmp_path), "it is a folder"),
        (Outputs(tmp_path / "no" / "a.html"), "there is no folder"),
        (Outputs(json=str(tmp_path / "no" / "a.json")), "there is no folder"),
        (Outputs(figure=tmp_path / "a.gif"), "a figure is"),
        (Outputs(trace=tmp_path / "full"), "exists: a trace is saved in a new folder"),
        (Outputs(page, trace=page), "one file for two outputs"),
    ):
        with pytest.raises(ParameterError, match=words):
            chosen.check()
    (tmp_path / "empty").mkdir()
    Outputs(page, trace=tmp_path / "empty").check()


def test_a_missing_extra_is_noticed_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)
    for chosen, name in (
        (Outputs(tmp_path / "a.html"), "plotly"),
        (Outputs(figure=tmp_path / "a.pdf"), "matplotlib"),
    ):
        with pytest.raises(ModuleNotFoundError, match=name) as missing:
            chosen.check()
        assert missing.value.name == name
    Outputs(json=str(tmp_path / "a.json")).check()


def test_json_names_its_format_and_keeps_every_number(result):
    read = json.loads(to_json(result))
    assert (read.pop("format"), read.pop("version")) == ("tieline-inspection", 1)
    assert read == json.loads(json.dumps(result))
    with pytest.raises(ValueError, match="JSON"):
        to_json({"number": float("nan")})
