"""How every command is run here, and what a run leaves behind undone."""

import pytest

from tieline import cli
from tieline.cli import progress


@pytest.fixture
def tieline(capsys):
    """Run a command in this process: its exit code, what it printed, and what it said on stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as left:
            cli.main([str(word) for word in words])
        told = capsys.readouterr()
        return left.value.code or 0, told.out, told.err

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
    """No lines of progress among the messages that a test compares, however busy the machine is."""
    monkeypatch.setattr(progress, "PATIENCE", 1e6)
