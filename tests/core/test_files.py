"""Files are whole or absent, whatever happens while they are written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tieline.core.errors import ParameterError
from tieline.core.files import check_target, write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    target = tmp_path / "report.html"
    for text in (b"one", b"", b"three"):
        write_whole(target, text)
        assert target.read_bytes() == text
        assert list(tmp_path.iterdir()) == [target]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    write_whole(target, b"old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_path_that_cannot_be_written_is_refused_beforehand(tmp_path):
    with pytest.raises(ParameterError, match="it is a folder"):
        check_target(tmp_path)
    with pytest.raises(ParameterError, match="there is no folder"):
        check_target(tmp_path / "missing" / "report.html")
    check_target(tmp_path / "report.html")
    check_target(Path("report.html"))


WRITER = """
import sys
from pathlib import Path
from tieline.core.files import write_whole
data = {name: name.encode() * 4_000_000 for name in "ab"}
print("ready", flush=True)
while True:
    for name in "ab":
        write_whole(Path(sys.argv[1]), data[name])
"""


def test_a_writer_killed_at_any_moment_leaves_a_complete_file_or_none(tmp_path):
    target = tmp_path / "report.html"
    whole = {name * 4_000_000 for name in (b"a", b"b")}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(40):
            time.sleep(0.004)
            assert not target.exists() or target.read_bytes() in whole
        writer.send_signal(signal.SIGKILL)
    assert not target.exists() or target.read_bytes() in whole
    rest = [path.name for path in tmp_path.iterdir() if path != target]
    assert all(name.startswith(".report.html.") and name.endswith(".partial") for name in rest)
