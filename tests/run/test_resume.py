"""A streamed inspection that was killed goes on where it was, to the same numbers."""

import errno
import json
import os
import random
import shutil
import signal
import time

import pytest

from tests.models.model_stream.test_passes import FAMILIES, saved
from tests.models.tiny_whole import WHOLE
from tests.run.test_observers import SMALL
from tieline.analysis.inspect import inspect
from tieline.core.errors import NoSpaceError
from tieline.core.records import to_plain
from tieline.models.model import Model
from tieline.run import resume
from tieline.trace.record import identical_values

pytestmark = pytest.mark.usefixtures("single_thread")


class Killed(BaseException):
    """Simulates the end of a process: no handler of the package catches it."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "cache_folder", lambda name: tmp_path / "cache" / name)


def inspected(folder):
    return inspect(Model.open(folder, stream=True, dtype="fp32"), **SMALL)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a small OLMoE, and its inspection without an interruption."""
    root = tmp_path_factory.mktemp("uninterrupted")
    folder = saved(root / "model", "olmoe", vocab_size=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "cache_folder", lambda name: root / "cache" / name)
        return folder, inspected(folder)


def killed_after(folder, reads):
    """Inspect until `reads` units were read, then raise `Killed`."""
    count = 0

    def progress(stage, done, total):
        nonlocal count
        count += 1
        if count > reads:
            raise Killed

    with pytest.raises(Killed):
        inspect(Model.open(folder, stream=True, dtype="fp32"), progress=progress, **SMALL)


def goes_on(folder, expected, reads, tmp_path):
    killed_after(folder, reads)
    loaded = Model.open(folder, stream=True, dtype="fp32")
    resumed = inspect(loaded, resume=True, **SMALL)
    assert identical_values(expected.trace, resumed.trace)
    assert to_plain(expected.measures) == to_plain(resumed.measures)
    assert (expected.jumps, expected.metrics) == (resumed.jumps, resumed.metrics)
    assert not any((tmp_path / "cache" / "streams").iterdir())
    return loaded.stream.weights


def test_a_run_killed_while_it_removes_its_state_leaves_nothing_half(
    uninterrupted, tmp_path, monkeypatch
):
    folder, expected = uninterrupted
    remove = shutil.rmtree

    def remove_one_file_of_the_state(path, ignore_errors=False):
        states = sorted(path.glob("model.layers.*/tensors"))
        if not states:
            return remove(path, ignore_errors)
        states[-1].unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_one_file_of_the_state)
        with pytest.raises(Killed):
            inspect(Model.open(folder, stream=True, dtype="fp32"), resume=True, **SMALL)
    resumed = inspect(Model.open(folder, stream=True, dtype="fp32"), resume=True, **SMALL)
    assert identical_values(expected.trace, resumed.trace)
    assert not any((tmp_path / "cache" / "streams").iterdir())


@pytest.mark.parametrize("reads", [1, 2, 3])
def test_a_killed_run_goes_on_without_reading_finished_layers_again(uninterrupted, reads, tmp_path):
    weights = goes_on(*uninterrupted, reads, tmp_path)
    units = list(weights.units)  # embedding, two layers, norm, head
    finished = 0 if reads == 1 else reads
    again = [name for name in units[:-1] if units.index(name) >= finished]
    again.append("lm_head")  # its weights are checked, though nothing needs them
    assert weights.shards.bytes_read == sum(weights.stored(name) for name in again)


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_a_disk_that_fills_leaves_a_run_that_goes_on(uninterrupted, writes, tmp_path, monkeypatch):
    (folder, expected), count = uninterrupted, 0

    def fills(write):
        def save(tensors, path, *more):
            nonlocal count
            count += 1
            if count > writes:
                path.write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(tensors, path, *more)

        return save

    with monkeypatch.context() as full:
        full.setattr(resume, "save_file", fills(resume.save_file))
        with pytest.raises(NoSpaceError, match=r"no space left .* go on with --resume"):
            inspected(folder)
    kept = [path.name for path in (tmp_path / "cache" / "streams").glob("*/*")]
    assert not [name for name in kept if name.endswith(".partial")]
    resumed = inspect(Model.open(folder, stream=True, dtype="fp32"), resume=True, **SMALL)
    assert identical_values(expected.trace, resumed.trace)
    assert (expected.jumps, expected.metrics) == (resumed.jumps, resumed.metrics)


LARGER = {"gemma4": {"vocab_size_per_layer_input": 512}}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_on_to_the_same_bits(family, tmp_path):
    if family in WHOLE:
        pytest.skip("its small model has fewer words than the tokenizer")
    changes = {"vocab_size": 512} | LARGER.get(family, {})
    folder = saved(tmp_path / "model", family, **changes)
    goes_on(folder, inspected(folder), 2, tmp_path)


def inspected_and_killed(folder, seconds):
    """Inspect in a separate process and kill it after a delay; whether it had finished."""
    child = os.fork()
    if not child:
        inspect(Model.open(folder, stream=True, dtype="fp32"), resume=True, **SMALL)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_the_next_run_goes_on(tmp_path):
    folder = saved(tmp_path / "model", "olmoe", vocab_size=512, num_hidden_layers=6)
    began = time.perf_counter()
    expected = inspected(folder)
    took, moments, kills = time.perf_counter() - began, random.Random(0), 0
    layer = max(map(Model.open(folder, stream=True).stream.weights.stored, ["model.layers.0"]))
    for _ in range(20):
        kills += not inspected_and_killed(folder, moments.uniform(0, took))
        states = list((tmp_path / "cache" / "streams").glob("*/last/state.json"))
        left = json.loads(states[0].read_text())["left"] if states else []
        loaded = Model.open(folder, stream=True, dtype="fp32")
        resumed = inspect(loaded, resume=True, **SMALL)
        assert identical_values(expected.trace, resumed.trace)
        assert (expected.jumps, expected.metrics) == (resumed.jumps, resumed.metrics)
        weights = loaded.stream.weights
        needed = sum(weights.stored(n) for n in weights.units if n not in left)
        assert needed <= weights.shards.bytes_read <= needed + layer
    assert kills >= 5
