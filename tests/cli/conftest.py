"""Run commands in this process, and undo their side effects."""

from functools import cache

import pytest
import typer

from tieline import cli
from tieline.cli import progress

BUILD_PARSER = typer.main.get_command


@pytest.fixture
def tieline(capsys):
    """Run a command in this process: its exit code, what it printed, and what it said on stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            cli.main([str(word) for word in arguments])
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture(autouse=True)
def _quiet_again():
    """Undo what a run sets for its own process."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Keep progress lines out of the messages that tests compare, also on busy machines."""
    monkeypatch.setattr(progress, "FIRST_PAUSE", 1e6)


@cache
def _parser(application, n_commands):
    """The parser of the application while it has this number of commands."""
    return BUILD_PARSER(application)


@pytest.fixture(autouse=True)
def _built_parser(monkeypatch):
    """Build the parser once: a process of its own needs one command, here all are registered."""
    monkeypatch.setattr(
        typer.main, "get_command", lambda app: _parser(app, len(app.registered_commands))
    )
