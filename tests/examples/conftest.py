"""How the worked examples are run here."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(monkeypatch, capsys, no_axis_checks):
    """Run an example as users run it, in this process: its exit code, stdout and stderr."""

    def run(name, *arguments):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", *arguments])
        code = 0
        try:
            runpy.run_path(f"examples/{name}.py", run_name="__main__")
        except SystemExit as left:
            code = left.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)
