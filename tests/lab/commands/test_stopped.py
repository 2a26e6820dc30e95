"""Runs of tieline train that were killed; the run that goes on is a process of its own."""

import shutil
import subprocess
import sys

import pytest

from tieline import cli

RECIPE = "demo-smoke-smooth1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A complete run, in a folder where another run was killed before its first file."""
    folder = tmp_path_factory.mktemp("train") / "run"
    folder.mkdir()
    (folder / ".config.json.0123456789abcdef.partial").touch()
    with pytest.raises(SystemExit) as left:
        cli.main(["train", RECIPE, "-o", str(folder), "--json"])
    assert not left.value.code
    return folder


def test_a_resumed_run_removes_halves_and_says_nothing_of_libraries(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    for name in ("model", "stock"):
        shutil.rmtree(folder / name)
    (folder / "result.json").unlink()
    (folder / "checkpoint-20" / "complete.json").unlink()
    (folder / "checkpoint-20" / "half").touch()
    arguments = ["train", RECIPE, "-o", str(folder), "--resume", "--json"]
    command = [sys.executable, "-m", "tieline", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    messages = [line for line in done.stderr.splitlines() if not line.endswith(" s")]  # progress
    assert (done.returncode, messages) == (0, [])
    assert not (folder / "checkpoint-20" / "half").exists()
    weights = [path / "model" / "model.safetensors" for path in (folder, trained)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_killed_before_its_first_file_does_not_block_the_next(trained):
    assert (trained / "result.json").exists()
    assert not [path for path in trained.iterdir() if path.name.startswith(".")]
