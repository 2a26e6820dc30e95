"""Checkpoints of spread runs, in one process: what is kept, what is refused, what is left alone."""

import pytest
import torch
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR

from tests.training.parallel.runs import config
from tests.training.parallel.tasks import Decoder, batch, fresh_model
from tieline.training.checkpoint import CheckpointError, last_checkpoint, read_json
from tieline.training.parallel.checkpoint import (
    RunState,
    load_weights,
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
    return RunState(model, optimizer, scheduler, {"coefficient": 0.5}, [{"loss": 2.0, "step": 1}])


def test_the_newest_two_are_kept_whole_and_tell_their_step(tmp_path):
    state = trained()
    (tmp_path / ".checkpoint-3.partial").mkdir()  # cut short before
    (tmp_path / ".checkpoint-3.partial" / "junk").write_text("")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, config(), state, fresh_model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    newest = last_checkpoint(tmp_path)
    assert newest == tmp_path / "checkpoint-3"
    assert not (newest / "junk").exists()
    told = read_json(newest / "trainer_state.json")
    assert (told["global_step"], told["max_steps"]) == (3, config().optim.steps)
    assert told["log_history"] == [{"loss": 2.0, "step": 1}]
    again = fresh_model()
    load_weights(again, newest)
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_gathering_leaves_the_random_numbers_alone():
    model = fresh_model().eval()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)

    whole = whole_model(model, Decoder)  # its first weights are drawn
    assert torch.equal(torch.rand(3), expected)
    assert not whole.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("head.bias"), "head.bias"),
        (lambda w: w.update(other=torch.zeros(1)), "other"),
        (lambda w: w.update({"head.bias": torch.zeros(3)}), "head.bias"),
    ],
    ids=["absent", "foreign", "another shape"],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, change, words):
    weights = dict(fresh_model().state_dict())
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"does not fit the model.*{words}"):
        load_weights(fresh_model(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(fresh_model(), tmp_path)
