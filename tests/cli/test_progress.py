"""Bars where a person looks, lines where a file is written."""

import io
import time

from rich.console import Console

from tieline.cli import progress
from tieline.cli.progress import progress_bars
from tieline.run import plan


def drawn(terminal, *steps):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with progress_bars(console) as report:
        for step in steps:
            report(*step)
    return console.file.getvalue()


def test_every_stage_and_the_silent_one_after_it_is_shown():
    steps = [("forward", 1, 2), ("forward", 2, 2), ("jumps", 1, 4), ("jumps", 4, 4)]
    text = drawn(True, *steps)
    for stage in ("loading the model", "forward", "measure", "jumps", "report"):
        assert stage in text


def test_a_stage_that_has_ended_may_go_on():
    text = drawn(True, ("jumps", 1, 1), ("losses", 0, 1), ("jumps", 1, 1), ("losses", 1, 1))
    assert "losses" in text


def waited(capsys, enough):
    """Return the text on stderr once it contains `enough`."""
    text = ""
    while enough not in text:
        time.sleep(0.005)
        text += capsys.readouterr().err
    return text


def test_a_file_gets_lines_also_while_nothing_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(progress, "LONGEST_PAUSE", 0.01)
    with progress_bars(Console(file=io.StringIO(), force_terminal=False)) as report:
        assert waited(capsys, "\n").startswith("loading the model, 0 s\n")
        report("forward", 1, 1200)
        assert "forward 1 of 1,200, 0 s\n" in waited(capsys, "forward")
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_quick_run_says_nothing(capsys):
    assert drawn(False, ("forward", 1, 2), ("forward", 2, 2)) == ""
    assert capsys.readouterr().err == ""


def announced(capsys, monkeypatch, seconds):
    """Lines on stderr while eight passes take `seconds` each."""
    clock = iter(seconds * number for number in range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = progress._ProgressLines("loading the model")
    for done in range(1, 9):
        lines("audit", done, 8)
    return capsys.readouterr().err.splitlines()


def test_a_long_stage_says_once_how_long_it_will_take(capsys, monkeypatch):
    assert announced(capsys, monkeypatch, 5.0) == ["audit: about 30 s more, after 2 of 8"]


def test_a_short_stage_says_nothing(capsys, monkeypatch):
    assert announced(capsys, monkeypatch, 1.2) == []


def test_the_time_of_the_whole_job_is_said_once_and_is_no_stage(capsys):
    lines = progress._ProgressLines("loading the model")
    lines(progress.IN_ALL, 0, 240)
    assert capsys.readouterr().err == "This will take about 4 min.\n"
    assert lines._latest[0] == "loading the model"
    assert "about 40 s" in drawn(True, (progress.IN_ALL, 0, 40), ("forward", 1, 2))
    assert progress.IN_ALL == plan.IN_ALL
