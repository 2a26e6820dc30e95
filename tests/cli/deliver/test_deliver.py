"""Files of a run: refused before the work, made before the first is written, whole or absent."""

import pytest

from tests.report.zoo import make_inspection, make_trace
from tieline import report
from tieline.cli import deliver as command
from tieline.cli.deliver import Outputs, deliver
from tieline.core import files
from tieline.core.errors import ParameterError
from tieline.report import drawing
from tieline.trace import store
from tieline.trace.store import load_trace


class Killed(BaseException):
    """The process dies here."""


@pytest.fixture(scope="module")
def result():
    from dataclasses import replace

    return replace(make_inspection(), trace=make_trace())


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(report, "page", lambda result: "page")
    monkeypatch.setattr(drawing, "drawn_bytes", lambda draw, path: b"figure")


def wanted(folder):
    names = (folder / "a.html", str(folder / "a.json"), folder / "a.pdf", folder / "trace")
    return Outputs(*names)


def complete(result, folder):
    expected = {"a.html": b"page", "a.json": result.to_json().encode(), "a.pdf": b"figure"}
    for path in folder.iterdir():
        if path.name == "trace":
            load_trace(path)
        elif not path.name.startswith("."):
            assert path.read_bytes() == expected[path.name]
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_all_files_are_written_and_named(result, tmp_path, capsys):
    chosen = wanted(tmp_path)
    chosen.check()
    deliver(result, chosen, "add --html")
    names = ["a.html", "a.json", "a.pdf", "trace"]
    assert complete(result, tmp_path) == set(names)
    told = capsys.readouterr()
    assert told.err.splitlines() == [f"wrote {tmp_path / name}" for name in names]
    assert result.verdict.split()[0] in told.out
    assert load_trace(tmp_path / "trace").n_tokens == result.trace.n_tokens


def test_json_on_stdout_is_no_file_and_a_run_without_files_gives_advice(result, capsys):
    deliver(result, Outputs(json="-"), "add --html")
    assert capsys.readouterr() == (result.to_json(), "")
    deliver(result, Outputs(), "add --html")
    assert capsys.readouterr().err == "add --html\n"


@pytest.mark.parametrize("step", range(8))
def test_a_run_that_dies_at_any_step_leaves_complete_files_or_none(
    result, tmp_path, monkeypatch, step
):
    left = iter([*range(step), None])

    def dies(real):
        def run(*args, **kwargs):
            if next(left, None) is None:
                raise Killed
            return real(*args, **kwargs)

        return run

    monkeypatch.setattr(store, "save_trace", dies(store.save_trace))
    monkeypatch.setattr(files.os, "fsync", dies(files.os.fsync))
    monkeypatch.setattr(files.Path, "replace", dies(files.Path.replace))
    with pytest.raises(Killed):
        deliver(result, wanted(tmp_path))
    complete(result, tmp_path)


def test_nothing_is_written_if_one_of_the_files_cannot_be_made(result, tmp_path, monkeypatch):
    def fails(draw, path):
        raise ParameterError("no gaps")

    monkeypatch.setattr(drawing, "drawn_bytes", fails)
    with pytest.raises(ParameterError, match="no gaps"):
        deliver(result, wanted(tmp_path))
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
        (Outputs(made=tmp_path / "full"), "is not empty: choose another folder$"),
        (Outputs(made=tmp_path / "full", overwrite=False), "or add --overwrite"),
        (Outputs(made=tmp_path / "full", overwrite=True), "something else than a model"),
        (Outputs(page, trace=page), "one file for two outputs"),
    ):
        with pytest.raises(ParameterError, match=words):
            chosen.check()
    (tmp_path / "empty").mkdir()
    Outputs(page, trace=tmp_path / "empty").check()


def test_a_missing_extra_is_noticed_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    for chosen, name in (
        (Outputs(tmp_path / "a.html"), "plotly"),
        (Outputs(figure=tmp_path / "a.pdf"), "matplotlib"),
    ):
        with pytest.raises(ModuleNotFoundError, match=name) as missing:
            chosen.check()
        assert missing.value.name == name
    Outputs(json=str(tmp_path / "a.json")).check()
