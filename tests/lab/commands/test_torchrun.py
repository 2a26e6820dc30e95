"""The command line that the documentation names: `torchrun … -m tieline train RECIPE`.

Every process imports torch and transformers, so these are slow; the same code runs on ranks that
are forked in tests/lab/training/training_run.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.training.runs import assert_same_files, assert_same_losses, assert_same_scores

RECIPE = "demo-smoke-smooth1"
LIMIT = 500  # seconds; only a hang takes so long, also on a busy machine
pytestmark = pytest.mark.slow


def torchrun(processes, *arguments):
    """Exit code and stderr of `torchrun --nproc-per-node … -m tieline …`; no process remains."""
    program = Path(sys.executable).with_name("torchrun")
    command = [program, "--nproc-per-node", processes, "-m", "tieline", *arguments]
    started = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        _, stderr = started.communicate(timeout=LIMIT)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    return started.returncode, stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The recipe in one process."""
    from tieline.lab.training.recipes import recipe_config
    from tieline.lab.training.training_run import run_training

    folder = tmp_path_factory.mktemp("alone") / "run"
    return run_training(recipe_config(RECIPE), folder).to_dict(), folder


@pytest.mark.parametrize("processes", [2, 4])
def test_a_recipe_under_torchrun_is_the_recipe_in_one_process(alone, tmp_path, processes):
    folder, page = tmp_path / "run", tmp_path / "found.json"
    code, stderr = torchrun(processes, "train", RECIPE, "--out", folder, "--json", page)
    assert code == 0, stderr
    result = json.loads(page.read_bytes())
    assert_same_losses(result, alone[0])
    assert_same_scores(result, alone[0])
    assert_same_files(folder, alone[1])


def test_rows_that_do_not_divide_over_the_processes_are_refused_in_one_message(tmp_path):
    """The first process exits with 2; torchrun stops the others, reports this and exits with 1."""
    folder = tmp_path / "run"
    code, stderr = torchrun(3, "train", RECIPE, "--out", folder)
    assert code == 1
    errors = [line for line in stderr.splitlines() if line.startswith("error")]
    assert errors == ["error: 8 rows of a micro-batch do not divide over 3 processes"]
    assert "exitcode  : 2" in stderr.partition("Root Cause")[2]
    assert "bug" not in stderr
    assert not folder.exists()
