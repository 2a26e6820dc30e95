"""Files of a run: refused before the work, made before the first is written, whole or absent."""

import os
import pty
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.report.zoo import make_inspection, make_trace
from tieline import report
from tieline.cli import outputs as command
from tieline.cli.outputs import Outputs, deliver
from tieline.core import files
from tieline.core.errors import ParameterError, TraceError
from tieline.report import matplotlib_figures
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
    monkeypatch.setattr(matplotlib_figures, "figure_bytes", lambda draw, path: b"figure")


def all_outputs(folder):
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
    chosen = all_outputs(tmp_path)
    chosen.check_targets()
    deliver(result, chosen, "add --html")
    names = ["a.html", "a.json", "a.pdf", "trace"]
    assert complete(result, tmp_path) == set(names)
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"wrote {tmp_path / name}" for name in names]
    assert result.verdict.split()[0] in captured.out
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
        deliver(result, all_outputs(tmp_path))
    complete(result, tmp_path)


def test_nothing_is_written_if_one_of_the_files_cannot_be_made(result, tmp_path, monkeypatch):
    def fails(draw, path):
        raise ParameterError("no gaps")

    monkeypatch.setattr(matplotlib_figures, "figure_bytes", fails)
    with pytest.raises(ParameterError, match="no gaps"):
        deliver(result, all_outputs(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_bad_places_are_refused_before_the_work(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    page = tmp_path / "a.html"
    for chosen, message in (
        (Outputs(tmp_path), "it is a folder"),
        (Outputs(tmp_path / "no" / "a.html"), "there is no folder"),
        (Outputs(json=str(tmp_path / "no" / "a.json")), "there is no folder"),
        (Outputs(figure=tmp_path / "a.gif"), "a figure is"),
        (Outputs(trace=tmp_path / "full"), "not empty: choose another folder or add --overwrite"),
        (Outputs(model=tmp_path / "full"), "not empty: choose another folder or add --overwrite"),
        (Outputs(model=tmp_path / "full", overwrite=True), "something else than a model"),
        (Outputs(model=tmp_path / "full" / "x" / "m"), "is not a folder"),
        (Outputs(page, trace=page), "one file for two outputs"),
        (Outputs(page, extended=tmp_path / "no" / ".." / "a.html"), "one file for two outputs"),
        (Outputs(Path("-"), "-"), "only one of them can go to stdout"),
        (Outputs(model=Path("-")), "a folder cannot go to stdout"),
    ):
        with pytest.raises(ParameterError, match=message):
            chosen.check_targets()
    (tmp_path / "empty").mkdir()
    Outputs(page, trace=tmp_path / "empty").check_targets()


def test_a_missing_extra_is_noticed_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    for chosen, name in (
        (Outputs(tmp_path / "a.html"), "plotly"),
        (Outputs(figure=tmp_path / "a.pdf"), "matplotlib"),
    ):
        with pytest.raises(ModuleNotFoundError, match=name) as missing:
            chosen.check_targets()
        assert missing.value.name == name
    Outputs(json=str(tmp_path / "a.json")).check_targets()


def test_an_output_is_never_an_input(tmp_path):
    model, link = tmp_path / "model", tmp_path / "link"
    model.mkdir()
    link.symlink_to(model)
    for name in ("config.json", "report.html"):
        (model / name).write_text("{}")
    text = tmp_path / "text.txt"
    text.touch()
    for chosen in (
        Outputs(model=model, overwrite=True),
        Outputs(model=link, overwrite=True),
        Outputs(model=tmp_path, overwrite=True),
        Outputs(trace=model, overwrite=True),
        Outputs(json=str(model / "config.json"), overwrite=True),
        Outputs(json=str(text)),
        Outputs(extended=text),
    ):
        with pytest.raises(ParameterError, match="an output never replaces"):
            chosen.check_targets(str(model), None, text)
    Outputs(model / "report.html", str(model / "new.json"), overwrite=True).check_targets(
        model, "org/name"
    )


def test_a_saved_trace_is_replaced_if_asked_to_and_nothing_else_is(result, tmp_path):
    folder = tmp_path / "trace"
    deliver(result, Outputs(trace=folder))
    chosen = Outputs(trace=folder, overwrite=True)
    chosen.check_targets()
    deliver(result, chosen)
    assert load_trace(folder).n_tokens == result.trace.n_tokens
    (folder / "notes.txt").touch()
    with pytest.raises(TraceError, match="left alone"):
        chosen.check_targets()


def test_the_page_may_go_to_stdout(result, capsysbinary, tmp_path):
    deliver(result, Outputs(Path("-"), str(tmp_path / "a.json")), "hint")
    captured = capsysbinary.readouterr()
    assert (captured.out, captured.err) == (b"page", f"wrote {tmp_path / 'a.json'}\n".encode())


@contextmanager
def terminal(typed):
    """Stdin and stderr that are a terminal on which somebody types."""
    keyboard, screen = pty.openpty()
    os.write(keyboard, typed)
    with (
        os.fdopen(os.dup(screen), "r") as stdin,
        os.fdopen(screen, "w") as stderr,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("sys.stdin", stdin)
        patch.setattr("sys.stderr", stderr)
        yield
    os.close(keyboard)


def test_a_file_is_replaced_on_a_terminal_only_after_a_yes(tmp_path):
    page = tmp_path / "a.html"
    with terminal(b""):
        Outputs(page).check_targets()
    page.touch()
    with terminal(b"y\n"):
        Outputs(page).check_targets()
    with terminal(b"n\n"), pytest.raises(ParameterError, match=r"stays as it is: .* --overwrite"):
        Outputs(page).check_targets()
    with terminal(b""):
        Outputs(page, overwrite=True).check_targets()


def test_files_are_replaced_unasked_without_a_terminal(tmp_path):
    page = tmp_path / "a.html"
    page.touch()
    Outputs(page).check_targets()
