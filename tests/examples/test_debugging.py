"""The worked examples of the documentation, on few tokens."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(name, *arguments):
    command = [sys.executable, f"examples/{name}.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_checkpoint_error_is_explained_and_repaired():
    said = run("checkpoint_error", "--tokens", "1024")
    assert "CheckpointError: torch.utils.checkpoint" in said
    assert "near-tie flip:" in said
    assert "in layer 'moe.gate'" in said
    assert "bf16:" in said
    assert said.endswith("4. With a fixed order of summation:\n   identical\n")


def test_a_kernel_test_knows_ties_from_bugs():
    said = run("kernel_test", "--tokens", "512")
    assert said.count("accepted:") == 2
    assert said.count("refused:") == 1
    assert "left out 63" in said
    assert said.endswith("without ties all ids agree, in order\n")


def test_examples_without_what_they_need_say_how_they_are_called():
    for name in ("cifar10_continuity", "pacs_domains"):
        command = [sys.executable, f"examples/{name}.py"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"usage: {name}.py" in done.stderr
        assert "Traceback" not in done.stderr
