"""Checkpoints of spread runs, in one process: what is kept, what is refused, what is left alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR

from tests.lab.training.parallel.runs import config, peaks
from tests.lab.training.parallel.tasks import Decoder, batch, fresh_model
from tieline.lab.training.checkpoint import CheckpointError, last_checkpoint, read_json
from tieline.lab.training.parallel.checkpoint import (
    TrainingState,
    consolidate,
    is_sharded,
    load_checkpoint,
    named_moments,
    named_weights,
    save_checkpoint,
    whole_model,
)


def trained():
    """A model after one step, with what moves beside it."""
    model = fresh_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    model(batch(0, 2)).sum().backward()
    optimizer.step()
    return TrainingState(
        model, optimizer, scheduler, {"coefficient": 0.5}, [{"loss": 2.0, "step": 1}]
    )


def test_the_newest_two_are_kept_whole_and_tell_their_step(tmp_path):
    state = trained()
    (tmp_path / ".checkpoint-3.partial").mkdir()  # cut short before
    (tmp_path / ".checkpoint-3.partial" / "junk").write_text("")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, config(), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    newest = last_checkpoint(tmp_path)
    assert newest == tmp_path / "checkpoint-3"
    assert not (newest / "junk").exists()
    told = read_json(newest / "trainer_state.json")
    assert (told["global_step"], told["max_steps"]) == (3, config().optim.steps)
    assert told["log_history"] == [{"loss": 2.0, "step": 1}]
    assert is_sharded(newest)
    assert not [path for path in newest.rglob("*") if path.suffix in (".pt", ".metadata", ".pkl")]
    consolidate(newest)
    weights = load_file(newest / "model.safetensors")
    assert weights.keys() == state.model.state_dict().keys()
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    moments = load_file(newest / "optimizer.safetensors")
    for number, entries in state.optimizer.state_dict()["state"].items():
        for name, tensor in entries.items():
            assert torch.equal(moments[f"{number}.{name}"], tensor)
    assert not is_sharded(newest)


def test_shards_are_read_in_place_and_wrong_ones_refused(tmp_path):
    state = trained()
    checkpoint = save_checkpoint(tmp_path, 1, config(), state)
    other = trained()
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(1.0)
    load_checkpoint(checkpoint, other.model, other.optimizer)
    mine, theirs = (
        named_weights(each.model) | named_moments(each.optimizer) for each in (other, state)
    )
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name
    wide = torch.nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_checkpoint(checkpoint, wide, torch.optim.AdamW(wide.parameters()))
    damaged = next((checkpoint / "shards").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="shards cannot be read"):
        load_checkpoint(checkpoint, other.model, other.optimizer)
    (checkpoint / "shards" / "x").mkdir()
    damaged.unlink()
    with pytest.raises(CheckpointError, match="shards does not fit the model"):
        load_checkpoint(checkpoint, other.model, other.optimizer)


def test_reading_the_trained_model_leaves_the_random_numbers_alone(tmp_path):
    state = trained()
    checkpoint = save_checkpoint(tmp_path, 1, config(), state)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)

    model = whole_model(checkpoint, Decoder)  # its first weights are drawn
    assert torch.equal(torch.rand(3), expected)
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("head.bias"), "head.bias"),
        (lambda w: w.update(other=torch.zeros(1)), "other"),
        (lambda w: w.update({"head.bias": torch.zeros(3)}), "head.bias"),
    ],
    ids=["absent", "foreign", "another shape"],
)
def test_weights_of_one_process_that_do_not_fit_are_refused(tmp_path, change, words):
    model = fresh_model()
    adam = torch.optim.AdamW(model.parameters())
    weights = dict(fresh_model().state_dict())
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"does not fit the model.*{words}"):
        load_checkpoint(tmp_path, model, adam)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path, model, adam)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to tell peaks")
def test_no_rank_takes_a_fifth_more_than_its_share(pair, tmp_path):
    for held, written, read in pair.run(peaks, tmp_path / "shards"):
        assert held > 100e6
        assert written < 0.2 * held
        assert read < 0.2 * held
