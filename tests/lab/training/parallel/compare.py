"""When two runs are the same: their losses, and the tensors in their files."""

import json

import pytest
from safetensors.torch import load_file

from tieline.lab.training.checkpoint import last_checkpoint
from tieline.lab.training.parallel.checkpoint import consolidate

CLOSE = 1e-5


def losses(result):
    return [(e["step"], e["task_loss"]) for e in result["history"] if "task_loss" in e]


def assert_same_losses(found, plain):
    assert [step for step, _ in losses(found)] == [step for step, _ in losses(plain)]
    for (_, mine), (_, theirs) in zip(losses(found), losses(plain), strict=True):
        assert mine == pytest.approx(theirs, abs=CLOSE)


def assert_same_tensors(found, plain):
    mine, theirs = load_file(found), load_file(plain)
    assert {name: (t.shape, t.dtype) for name, t in mine.items()} == {
        name: (t.shape, t.dtype) for name, t in theirs.items()
    }
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).abs().max() <= CLOSE, name


def assert_same_scores(found, plain):
    for split in ("validation", "test"):
        mine, theirs = (result["scores"][split]["loss"] for result in (found, plain))
        assert mine == pytest.approx(theirs, abs=CLOSE)


def assert_same_files(found, plain):
    """The newest checkpoints, consolidated, and the trained models of two folders."""
    mine, theirs = last_checkpoint(found), last_checkpoint(plain)
    consolidate(mine)
    assert mine.name == theirs.name
    kept = [{p.name for p in f.glob("checkpoint-*")} for f in (found, plain)]
    assert kept[0] == kept[1]
    assert {p.name for p in mine.iterdir()} - {"shards"} == {p.name for p in theirs.iterdir()}
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(mine / name, theirs / name)
    for name in ("config.json", "complete.json"):
        assert json.loads((mine / name).read_text()) == json.loads((theirs / name).read_text())
    assert_same_tensors(*(folder / "model" / "model.safetensors" for folder in (found, plain)))
