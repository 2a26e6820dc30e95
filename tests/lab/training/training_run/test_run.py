"""Whole runs: training, checkpoints, going on after a kill, refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.lab.training.tiny import tiny
from tieline.core.errors import TielineError
from tieline.lab.training.checkpoint import last_checkpoint
from tieline.lab.training.config import GATE_NAMES
from tieline.lab.training.training_run import run_training, training_plan
from tieline.models.model import Model

ROOT = Path(__file__).parents[4]
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.lab.training.tiny import tiny
from tieline.lab.training.training_run import run_training

def kill(stage, done, of):
    if stage == "train" and done == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

run_training(tiny(sys.argv[1], steps=6, checkpoint_every=2), Path(sys.argv[2]), progress=kill)
"""


def kill_at(step, gate, out):
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-c", KILLED, gate, str(out), str(step)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def final(result):
    return result.scores["validation"]["loss"], result.scores["test"]["loss"]


def weights(out):
    return AutoModelForCausalLM.from_pretrained(out / "model").state_dict()


@pytest.mark.parametrize("gate", [pytest.param("annealed", marks=pytest.mark.slow), "remoe"])
def test_a_killed_run_goes_on_to_the_same_end(gate, tmp_path):
    config = tiny(gate, steps=6, checkpoint_every=2)
    full_run = run_training(config, tmp_path / "whole")
    kill_at(5, gate, tmp_path / "killed")
    resumed = run_training(config, tmp_path / "killed", resume=True)
    assert resumed.resumed_from == 4
    assert final(resumed) == final(full_run)
    expected = weights(tmp_path / "whole")
    for name, tensor in weights(tmp_path / "killed").items():
        assert torch.equal(tensor, expected[name]), name
    logged = [entry["task_loss"] for entry in full_run.history if "task_loss" in entry]
    assert [e["task_loss"] for e in resumed.history if "task_loss" in e] == logged


def test_a_kill_before_the_first_checkpoint_begins_again_and_a_cut_one_is_passed_over(tmp_path):
    config = tiny("smoe", steps=4, checkpoint_every=2)
    full_run = run_training(config, tmp_path / "whole")
    killed = tmp_path / "killed"  # as a kill in the middle of the first checkpoint leaves it
    (killed / "checkpoint-2").mkdir(parents=True)
    (killed / "checkpoint-2" / "model.safetensors").write_bytes(b"half")
    shutil.copy(tmp_path / "whole" / "config.json", killed)
    assert last_checkpoint(killed) is None
    resumed = run_training(config, killed, resume=True)
    assert resumed.resumed_from == 0
    assert final(resumed) == final(full_run)


def test_nothing_is_pickled_and_what_is_kept_is_whole(tmp_path):
    result = run_training(tiny("smooth1", checkpoint_every=3), tmp_path)
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".md", ".py"}  # with model card and code
    record = json.loads((tmp_path / "result.json").read_bytes())
    assert record["scores"] == result.scores
    assert (
        run_training(tiny("smooth1", checkpoint_every=3), tmp_path, resume=True).scores
        == result.scores
    )
    loaded = Model.open(str(tmp_path / "stock"))
    ids = torch.arange(32).view(1, 32)
    with torch.no_grad():
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()(ids).logits
        torch.testing.assert_close(loaded.module(ids).logits, trained, atol=1e-5, rtol=1e-5)
    assert loaded.tokenizer("ab")["input_ids"] == [97, 98]


def test_one_process_trains_in_a_folder_and_a_new_run_spares_what_is_there(tmp_path):
    config, out = tiny("smoe", steps=4, checkpoint_every=2), tmp_path / "run"

    def second(stage, done, of):
        if stage == "train" and done == 3:
            (out / "checkpoint-9").mkdir()  # as if it were being written
            with pytest.raises(TielineError, match=r"another process writes to .*run: wait"):
                run_training(config, out, resume=True)
            assert (out / "checkpoint-9").exists()
            with pytest.raises(TielineError, match=r"another process writes|is not empty"):
                run_training(config, out)

    run_training(config, out, progress=second)
    assert (out / "result.json").exists()


def test_the_files_of_a_run_are_as_readable_as_their_siblings(tmp_path):
    run_training(tiny("smooth1", checkpoint_every=3), tmp_path / "run")
    (tmp_path / "sibling").touch()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "sibling").stat().st_mode}


def test_a_configuration_made_meanwhile_is_left_alone(tmp_path):
    def meanwhile(stage, done, of):
        if stage == "data":
            (tmp_path / "config.json").write_text("mine")

    # another process wrote the file before the run does
    with pytest.raises(TielineError, match=r"config\.json exists"):
        run_training(tiny("smoe"), tmp_path, progress=meanwhile)
    assert (tmp_path / "config.json").read_text() == "mine"


@pytest.mark.parametrize("gate", GATE_NAMES)
def test_every_gate_trains_and_learns(gate, tmp_path):
    result = run_training(tiny(gate, steps=12), tmp_path)
    losses = [entry["task_loss"] for entry in result.history if "task_loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    scores = result.scores["validation"]
    assert 0 < scores["bpc"] < 8
    if gate in ("smoe", "cosine", "perturbed", "sigmoid", "annealed"):  # scored with hard top-2
        assert scores["experts_per_token"] == 2
    if gate == "top3":
        assert scores["experts_per_token"] == 3


def test_the_monitor_speaks_in_the_log_of_the_trainer(tmp_path):
    result = run_training(tiny("smooth50"), tmp_path)
    logged = [entry for entry in result.history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6]
    for entry in logged:
        assert entry["routing/active"] >= 2
        assert entry["routing/epsilon"] > 0
        assert entry["loss"] > entry["task_loss"] - 1


def test_recomputed_layers_give_the_losses_of_kept_ones(tmp_path):
    stored = run_training(tiny("smooth1"), tmp_path / "kept")
    recomputed = run_training(tiny("smooth1", recompute=True), tmp_path / "again")
    for entry, other in zip(stored.history[:3], recomputed.history[:3], strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert stored.scores["validation"]["loss"] == pytest.approx(
        recomputed.scores["validation"]["loss"], abs=1e-5
    )


def test_micro_batches_add_up_to_the_batch(tmp_path):
    single_run = run_training(
        tiny("smoe", losses__balance=0.0, losses__router_z=0.0), tmp_path / "one"
    )
    accumulated_run = run_training(
        tiny("smoe", losses__balance=0.0, losses__router_z=0.0, optim__accumulate=2),
        tmp_path / "two",
    )
    assert single_run.scores["validation"]["loss"] == pytest.approx(
        accumulated_run.scores["validation"]["loss"], abs=1e-4
    )


def test_folders_of_other_runs_are_refused_and_left_alone(tmp_path):
    run_training(tiny(), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(TielineError, match="not empty"):
        run_training(tiny(), tmp_path)
    with pytest.raises(TielineError, match=r"another run: \['gate', 'recipe'\]"):
        run_training(tiny("top3"), tmp_path, resume=True)
    with pytest.raises(TielineError, match=r"another run: .'seed'"):
        run_training(tiny().replace(seed=1), tmp_path, resume=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    with pytest.raises(TielineError, match="no run to resume"):
        run_training(tiny(), tmp_path / "none", resume=True)


def test_a_plan_tells_size_data_and_time_without_training(tmp_path):
    plan = training_plan(tiny("smoe", steps=10))
    experts, attention = 8 * 3 * 16 * 32, 4 * 32 * 32
    assert plan.parameters == experts + attention + 8 * 32 + 256 * 32 + 3 * 32
    assert plan.seconds == pytest.approx(10 * plan.step_seconds)
    assert "bytes" in plan.data
