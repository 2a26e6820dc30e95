"""Rows survive cut lines, a full disk and concurrent writers."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tieline.core.errors import NoSpaceError, TielineError
from tieline.lab.estimation.rates import RateRow, RateStore

ROOT = Path(__file__).parents[4]


def row(study="a", n=10, repetition=0, **changes):
    numbers = {"raw": 0.5, "quotient": 0.25, "function": 0.1, "loss": 1e-4, "radius": 0.1}
    counts = {"n": n, "repetition": repetition, "status": 1, "iterations": 4, "empty": 0}
    return RateRow(**{"study": study, **counts, **numbers, "seconds": 0.1, **changes})


@pytest.fixture
def store(tmp_path):
    return RateStore(tmp_path / "rows.jsonl")


def test_rows_come_back_by_study(store):
    assert store.load("a") == []
    store.add([row(), row(repetition=1)])
    store.add([row("b")])
    store.add([row(n=20, raw=None)])
    assert store.load("a") == [row(), row(repetition=1), row(n=20, raw=None)]
    assert store.load("b") == [row("b")]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_half_a_line_at_the_end_is_dropped_and_written_over(store, cut):
    store.add([row(), row(repetition=1)])
    data = store.path.read_bytes()
    store.path.write_bytes(data[:-cut])
    assert store.load("a") == [row()]
    store.add([row(repetition=2)])
    assert store.load("a") == [row(), row(repetition=2)]


@pytest.mark.parametrize("end", [b"\x00\xff garbage\n", b'{"study": 3}\n', b"[1,2]\n"])
def test_a_broken_last_line_is_dropped_and_written_over(store, end):
    store.add([row()])
    with store.path.open("ab") as file:
        file.write(end)
    assert store.load("a") == [row()]
    store.add([row(repetition=2)])
    assert store.load("a") == [row(), row(repetition=2)]


def test_a_broken_line_elsewhere_is_refused_by_its_number(store):
    store.add([row()])
    good = store.path.read_bytes()
    store.path.write_bytes(good + b"{]\n" + good)
    with pytest.raises(TielineError, match="line 2"):
        store.load("a")


@pytest.mark.parametrize("change", [{"n": -1}, {"raw": "x"}, {"status": None}, {"seconds": []}])
def test_rows_of_the_wrong_kind_are_refused(store, change):
    store.add([row()])
    good = store.path.read_bytes()
    bad = json.dumps(asdict(row()) | change).encode() + b"\n"
    store.path.write_bytes(good + bad + good)
    with pytest.raises(TielineError, match="not a row of a rate study"):
        store.load("a")


def test_a_number_that_is_none_is_not_written(store):
    with pytest.raises(TielineError):
        store.add([row(raw=float("nan"))])


def test_places_that_cannot_be_written_to_are_refused(tmp_path):
    with pytest.raises(TielineError, match="there is no"):
        RateStore(tmp_path / "nowhere" / "x").check()
    with pytest.raises(TielineError, match="it is a folder"):
        RateStore(tmp_path).check()
    RateStore(tmp_path / "x").check()


ADDER = """
import sys
from pathlib import Path
from tests.lab.estimation.rates.test_rate_store import row
from tieline.lab.estimation.rates import RateStore
for number in range(60):
    RateStore(Path(sys.argv[1])).add([row(sys.argv[2], repetition=number)])
"""


def test_two_runs_that_add_at_once_lose_no_row(store):
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-c", ADDER, str(store.path)]
    env = {**os.environ, "PYTHONPATH": path}
    adders = [subprocess.Popen([*command, name], env=env) for name in "ab"]
    assert [adder.wait() for adder in adders] == [0, 0]
    for name in "ab":
        assert [row.repetition for row in store.load(name)] == list(range(60))


def test_a_full_disk_is_said_and_no_half_line_is_left(store, monkeypatch):
    store.add([row()])
    before, write = store.path.read_bytes(), os.write

    def half_then_full(handle, data):
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data[: len(data) - 50])

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(NoSpaceError, match=r"no space left on the disk of .*rows\.jsonl"):
        store.add([row(repetition=1)])
    assert store.path.read_bytes() == before
