"""A recipe on two ranks is the recipe in one process: losses, checkpoints, model, scores."""

import shutil

import pytest

from tests.lab.training.runs import (
    assert_same_files,
    assert_same_losses,
    assert_same_scores,
    config,
    run_and_lose,
    run_here,
)
from tieline.lab.training.checkpoint import last_checkpoint
from tieline.lab.training.training_run import run_training

PATIENCE = {"timeout": 60.0}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in one process, by transformers' Trainer."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return run_training(config(), folder).to_dict(), folder


def test_a_run_on_two_ranks_has_the_losses_and_files_of_one_process(pair, alone, tmp_path):
    plain, plain_folder = alone
    result, nothing = pair.run(run_here, config(), tmp_path / "run", PATIENCE)
    assert nothing is None
    assert_same_losses(result, plain)
    assert_same_scores(result, plain)
    assert_same_files(tmp_path / "run", plain_folder)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["remoe", "annealed", "cosine"])
def test_other_gates_and_their_schedules_too(pair, tmp_path, gate):
    plain = run_training(config(gate), tmp_path / "alone").to_dict()
    result, _ = pair.run(run_here, config(gate), tmp_path / "run", PATIENCE)
    assert_same_losses(result, plain)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"recompute": True}, {"optim__accumulate": 1}])
def test_recomputed_and_whole_batches_too(pair, tmp_path, changes):
    plain = run_training(config(**changes), tmp_path / "alone").to_dict()
    result, _ = pair.run(run_here, config(**changes), tmp_path / "run", PATIENCE)
    assert_same_losses(result, plain)


def test_a_killed_rank_leaves_a_checkpoint_and_an_error_and_one_process_goes_on(
    ranks, alone, tmp_path
):
    two, folder = ranks(2), tmp_path / "run"
    two.start(run_and_lose, config(), folder, PATIENCE, "SIGKILL", 4)
    succeeded, error = two.outcome(0)
    assert not succeeded
    assert "LostRankError: rank 0: another rank has died" in error
    assert "in step 5; start again with --resume" in error
    two.processes[1].join(60)
    assert two.processes[1].exitcode == -9
    assert last_checkpoint(folder).name == "checkpoint-4"
    result = run_training(config(), folder, resume=True).to_dict()
    assert result["resumed_from"] == 4
    assert_same_losses(result, alone[0])


def test_what_one_process_began_two_ranks_end(pair, alone, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(alone[1], folder)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoint-6")
    result, _ = pair.run(run_here, config(), folder, {**PATIENCE, "resume": True})
    assert result["resumed_from"] == 4
    assert_same_losses(result, alone[0])
    again, _ = pair.run(run_here, config(), folder, {**PATIENCE, "resume": True})
    assert again == result


@pytest.mark.slow
def test_what_two_ranks_began_three_end(pair, ranks, alone, tmp_path):
    folder = tmp_path / "run"
    pair.run(run_here, config(), folder, PATIENCE)
    for name in ("model", "checkpoint-6"):
        shutil.rmtree(folder / name)
    (folder / "result.json").unlink()
    result, *_ = ranks(3).run(run_here, config(), folder, {**PATIENCE, "resume": True})
    assert result["resumed_from"] == 4
    assert_same_losses(result, alone[0])


@pytest.mark.slow
def test_a_silent_rank_is_an_error_after_the_timeout(ranks, tmp_path):
    two = ranks(2, patience=15.0)
    two.start(run_and_lose, config(), tmp_path / "run", {"timeout": 15.0}, "SIGSTOP", 2)
    succeeded, error = two.outcome(0)
    assert not succeeded
    assert "LostRankError: rank 0: another rank has died or does not answer" in error


def test_a_folder_in_use_is_refused_on_every_rank(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("")
    two = ranks(2)
    two.start(run_here, config(), tmp_path / "run", PATIENCE)
    for rank in range(2):
        succeeded, error = two.outcome(rank)
        assert not succeeded
        assert "is not empty: a run begins in a new folder" in error


@pytest.mark.parametrize("batch", [2, 6])
def test_rows_that_do_not_divide_are_refused_before_anything_is_written(pair, tmp_path, batch):
    folder, message = tmp_path / "run", f"{batch // 2} rows of a micro-batch do not divide over 2"
    pair.start(run_here, config(optim__batch=batch), folder, PATIENCE)
    for rank, kind in enumerate(["ParameterError", "FirstRankError: rank 0 failed"]):
        succeeded, error = pair.outcome(rank)
        assert not succeeded
        assert kind in error
        assert message in error
    assert not folder.exists()
