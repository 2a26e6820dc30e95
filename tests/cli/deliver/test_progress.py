"""Bars where a person looks, nothing where a file is written."""

import io

from rich.console import Console

from tieline.cli.deliver import progress_bars


def drawn(terminal, *steps):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with progress_bars(console) as report:
        for step in steps:
            report(*step)
    return console.file.getvalue()


def test_every_stage_and_the_silent_one_after_it_is_shown():
    steps = [("forward", 1, 2), ("forward", 2, 2), ("jumps", 1, 4), ("jumps", 4, 4)]
    text = drawn(True, *steps)
    for stage in ("forward", "measure", "jumps", "report"):
        assert stage in text


def test_a_stage_that_has_ended_may_go_on():
    text = drawn(True, ("jumps", 1, 1), ("losses", 0, 1), ("jumps", 1, 1), ("losses", 1, 1))
    assert "losses" in text


def test_a_file_gets_nothing():
    assert drawn(False, ("forward", 1, 2), ("forward", 2, 2)) == ""
