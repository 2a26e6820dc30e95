"""State that is restored exactly, and files that are refused."""

import os
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR

from tieline.core.errors import TielineError
from tieline.core.records import write_json
from tieline.lab.training.checkpoint import (
    last_checkpoint,
    load_generators,
    load_optimizer,
    mark_complete,
    read_json,
    save_generators,
    save_optimizer,
)


def training_state(width=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}])
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (step + 1))


def step(model, optimizer, scheduler):
    optimizer.zero_grad()
    model(torch.randn(4, model.in_features)).square().sum().backward()
    optimizer.step()
    scheduler.step()


def test_optimiser_scheduler_and_generators_go_on_as_if_nothing_had_happened(tmp_path):
    model, optimizer, scheduler = training_state()
    for _ in range(3):
        step(model, optimizer, scheduler)
    save_optimizer(tmp_path, optimizer, scheduler, {"coefficient": 0.5})
    save_generators(tmp_path)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    step(model, optimizer, scheduler)
    numbers = random.random(), np.random.random(), torch.rand(2)  # noqa: NPY002
    other, second, later = training_state()
    other.load_state_dict(weights)
    assert load_optimizer(tmp_path, second, later) == {"coefficient": 0.5}
    load_generators(tmp_path)
    step(other, second, later)
    again = random.random(), np.random.random(), torch.rand(2)  # noqa: NPY002
    assert numbers[:2] == again[:2]
    assert torch.equal(numbers[2], again[2])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in second.param_groups]


def test_the_state_of_another_model_is_refused(tmp_path):
    model, optimizer, scheduler = training_state()
    step(model, optimizer, scheduler)
    save_optimizer(tmp_path, optimizer, scheduler, {})
    _, wide, later = training_state(width=5)
    with pytest.raises(TielineError, match="moments of parameter 0 do not fit"):
        load_optimizer(tmp_path, wide, later)
    single_group = torch.optim.AdamW(model.parameters())
    with pytest.raises(TielineError, match=r"groups of \[1, 1\] parameters, the run has \[2\]"):
        load_optimizer(tmp_path, single_group, LambdaLR(single_group, lambda s: 1.0))
    save_file({"x.exp_avg": torch.zeros(1)}, tmp_path / "optimizer.safetensors")
    with pytest.raises(TielineError, match=r"unknown entry 'x\.exp_avg'"):
        load_optimizer(tmp_path, optimizer, scheduler)
    (tmp_path / "optimizer.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(TielineError, match="cannot be read"):
        load_optimizer(tmp_path, optimizer, scheduler)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(TielineError, match=r"state\.json cannot be read"):
        load_optimizer(tmp_path, optimizer, scheduler)


def test_the_newest_complete_checkpoint_counts(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for number in (9, 10, 100):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    for number in (9, 10):
        mark_complete(tmp_path / f"checkpoint-{number}", number)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"step": float("nan")})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        with pytest.raises(OSError, match="no room"):
            write_json(path, {"step": 2})
    assert read_json(path) == {"step": 1}
    write_json(path, {"step": 3})
    assert read_json(path) == {"step": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
