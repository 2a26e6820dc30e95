"""Engines that install by halves: nothing is left that would pass for an engine."""

import subprocess
from pathlib import Path

import pytest

from tieline.engines import Engine
from tools import install_engines

HALF = ('mkdir -p "$VENV/bin"', 'touch "$VENV/bin/python"')


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def engine_of(*commands):
    return Engine("half", Path(__file__), "numpy", (), "anything", commands, "0 MB")


def test_commands_run_with_the_folder_of_the_engine():
    engine = engine_of(*HALF)
    install_engines.install(engine)
    assert (engine.folder / "bin" / "python").is_file()


def test_a_command_that_fails_is_one_line_and_leaves_nothing(monkeypatch):
    engine = engine_of(*HALF, "exit 7")
    monkeypatch.setattr(install_engines, "ENGINES", {"half": engine})
    monkeypatch.setattr(install_engines, "engine_named", lambda _: engine)
    monkeypatch.setattr("sys.argv", ["install_engines"])
    with pytest.raises(SystemExit) as stop:
        install_engines.main()
    assert stop.value.code == "error: half: `exit 7` left with code 7"
    assert not engine.folder.exists()


def test_ctrl_c_leaves_nothing(monkeypatch):
    engine, run = engine_of(*HALF), subprocess.run

    def stopped(command, **options):
        run(command, **options)
        if HALF[1] in command:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        install_engines.install(engine)
    assert not engine.folder.exists()
