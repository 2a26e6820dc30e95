"""The numbers of a rollout in each logger that is installed, read back from what it wrote."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")
KEY = "rollout/flip_rate"


def logged_steps(logger, folder):
    """Values of the flip rate that a logger stored, by step."""
    if logger == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
        return {event.step: event.value for event in events.Scalars(KEY)}
    if logger == "mlflow":
        with sqlite3.connect(folder / "mlflow.db") as database:
            query = "select step, value from metrics where key = ?"
            return dict(database.execute(query, (KEY,)).fetchall())
    with sqlite3.connect(folder / "rollouts.db") as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    logs = {step: json.loads(text) for step, text in rows}
    return {step: log[KEY] for step, log in logs.items() if KEY in log}


def run_example(logger, folder):
    """Run the example in a process of its own, at whose end some loggers write; its output."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "examples/rollout_loggers.py", logger, str(folder)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_trainer_prints_the_numbers(tmp_path):
    assert run_example("trainer", tmp_path).count(f"'{KEY}'") == 3


@pytest.mark.parametrize("logger", ["tensorboard", "trackio", "mlflow"])
def test_a_logger_takes_the_numbers_as_they_are(tmp_path, logger):
    pytest.importorskip(logger, reason=f"{logger} is not installed")
    run_example(logger, tmp_path)
    steps = logged_steps(logger, tmp_path)
    assert sorted(steps) == [0, 1, 2]
    assert all(0 < value < 0.1 for value in steps.values())


def test_weights_and_biases_takes_the_numbers_as_they_are(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    run_example("wandb", tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert file.read_bytes().count(KEY.encode()) >= 3
