"""Tensors that a thread reads before they are asked for are those that are read when asked for."""

import threading

import pytest
import torch
from safetensors.torch import save_file

from tieline.core.errors import UnsupportedModelError
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


def room(size):
    return torch.empty(size, dtype=torch.uint8)


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "tieline-read-ahead"]


@pytest.mark.parametrize("size", [0, 400, CHUNK, 4 * CHUNK])
def test_what_is_read_ahead_is_what_is_stored_whatever_the_memory_holds(folder, size):
    direct, ahead = open_shards(folder), open_shards(folder)
    ahead.read_ahead(ahead.tensors, room(size))
    for name, stored in direct.tensors.items():
        expected = direct.read(name)
        assert torch.equal(ahead.read(name).view(torch.uint8), expected.view(torch.uint8))
        cast = torch.zeros(2, *stored.shape, dtype=torch.float64)
        direct.copy(name, cast[0])
        ahead.copy(name, cast[1])
        assert torch.equal(cast[0], cast[1])
    assert ahead.bytes_read == direct.bytes_read == 2 * direct.size
    assert ahead.bytes_ahead <= 2 * size
    assert (ahead.bytes_ahead == 2 * ahead.size) == (size > ahead.size)
    ahead.stop_reading()
    assert not readers()


def test_memory_of_one_thread_is_used_again_by_the_next(folder):
    shards, memory = open_shards(folder), room(4 * CHUNK)
    for names in (["w.0", "w.1"], ["long"], ["w.2"]):
        shards.read_ahead(names, memory)
        assert len(readers()) <= 1
        for name in names:
            assert torch.equal(shards.read(name), open_shards(folder).read(name))
    assert shards.bytes_ahead == shards.bytes_read
    shards.stop_reading()


@pytest.mark.parametrize("name", ["w.0", "long"])
def test_a_thread_that_cannot_read_leaves_the_error_to_whoever_asks(folder, name):
    direct, ahead = open_shards(folder), open_shards(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: direct.tensors[name].start])
    ahead.read_ahead([name], room(4 * CHUNK))
    messages = []
    for shards in (direct, ahead):
        with pytest.raises(UnsupportedModelError) as refusal:
            shards.read(name)
        messages.append(str(refusal.value))
    assert messages[0] == messages[1]
    ahead.stop_reading()


def test_a_fault_of_the_thread_itself_is_raised_and_not_waited_for(folder, monkeypatch):
    def fault(*_):
        raise MemoryError("of the thread")

    shards = open_shards(folder)
    monkeypatch.setattr(shards, "fill_bytes", fault)
    shards.read_ahead(["long"], room(4 * CHUNK))
    with pytest.raises(MemoryError, match="of the thread"):
        shards.read("long")
    shards.stop_reading()


def test_memory_that_does_not_fit_the_kind_is_refused(folder):
    shards = open_shards(folder)
    shards.read_ahead(["long"], room(4 * CHUNK)[1:])  # memory that no bfloat16 can lie on
    with pytest.raises(RuntimeError, match="storage_offset"):
        shards.copy("long", torch.zeros(shards.tensors["long"].shape))
    shards.stop_reading()


def test_a_thread_that_is_stopped_forgets_what_it_has_read(folder):
    shards = open_shards(folder)
    shards.read_ahead(shards.tensors, room(4 * CHUNK))
    shards.stop_reading()
    assert not readers()
    assert torch.equal(shards.read("long"), open_shards(folder).read("long"))
    assert shards.bytes_ahead == 0
