"""Tensors are read as they are stored, whole or in part, as they are or cast."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tieline.models.shards import CHUNK, open_shards

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)


@pytest.fixture
def folder(tmp_path):
    """A file with tensors of all kinds and odd sizes, one of them longer than a piece."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"w.{number}": torch.randn(3 + number, 7, generator=generator).to(kind)
        for number, kind in enumerate(KINDS)
    }
    tensors["long"] = torch.randn(CHUNK // 2 + 5, generator=generator).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_tensors_are_those_of_the_file_whole_and_in_part(folder):
    shards, stored = open_shards(folder), load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        assert torch.equal(shards.read(name).view(torch.uint8), tensor.view(torch.uint8))
        rows = slice(1, 3)
        assert torch.equal(
            shards.read(name, rows).view(torch.uint8), tensor[rows].view(torch.uint8)
        )
        cast = torch.zeros(tensor.shape, dtype=torch.float64)
        shards.copy(name, cast)
        assert torch.equal(cast, tensor.double())


def test_the_system_is_asked_for_the_bytes_of_the_tensors_alone(folder, monkeypatch):
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system takes no advice on files")
    shards, requests = open_shards(folder), []
    monkeypatch.setattr(os, "posix_fadvise", lambda *request: requests.append(request[1:3]))
    names = ["w.0", "long"]
    shards.prefetch(names)
    requested = torch.zeros((folder / "model.safetensors").stat().st_size, dtype=torch.bool)
    stored = requested.clone()
    for start, size in requests:
        requested[start : start + size] = True
    for name in names:
        stored[shards.tensors[name].start : shards.tensors[name].stop] = True
    assert torch.equal(requested, stored)
