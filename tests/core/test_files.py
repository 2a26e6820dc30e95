"""Files are whole or absent, whatever happens while they are written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tieline.core.errors import ParameterError
from tieline.core.files import (
    cache_folder,
    check_target,
    check_targets,
    file_digest,
    whole_folder,
    write_whole,
)


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


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    link, target = tmp_path / "link.json", inner / "real.json"
    link.symlink_to(target)
    for data in (b"one", b"two"):
        check_target(link)
        write_whole(link, data)
        assert link.is_symlink()
        assert target.read_bytes() == data
        assert list(inner.iterdir()) == [target]


def test_pipes_and_devices_are_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_target(pipe)
    write_whole(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    check_target(Path("/dev/null"))
    write_whole(Path("/dev/null"), b"away")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_no_file_serves_two_outputs(tmp_path):
    check_targets(tmp_path / "a", None, tmp_path / "b")
    with pytest.raises(ParameterError, match="one file for two outputs"):
        check_targets(tmp_path / "a", None, tmp_path / "x" / ".." / "a")


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "new" / "model"
    with whole_folder(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_bytes(b"w")
        assert not target.exists()
    assert (target / "inner" / "weights").read_bytes() == b"w"
    assert list(target.parent.iterdir()) == [target]


def failing_folder(target, **options):
    with whole_folder(target, **options) as folder:
        (folder / "half").write_bytes(b"h")
        raise RuntimeError("no")


@pytest.mark.parametrize("replace", [True, False])
def test_a_folder_that_fails_leaves_what_was_there(tmp_path, replace):
    target = tmp_path / "model"
    with pytest.raises(RuntimeError):
        failing_folder(target, replace=replace)
    assert list(tmp_path.iterdir()) == []
    target.mkdir()
    (target / "old").write_bytes(b"o")
    with pytest.raises(RuntimeError):
        failing_folder(target, replace=replace)
    assert [path.name for path in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_folder_is_replaced_only_where_allowed(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    with whole_folder(target) as folder:  # an empty one may always be filled
        (folder / "old").write_bytes(b"o")
    with pytest.raises(OSError, match="not empty"), whole_folder(target) as folder:
        (folder / "new").write_bytes(b"n")
    assert [path.name for path in target.iterdir()] == ["old"]
    with whole_folder(target, replace=True) as folder:
        (folder / "new").write_bytes(b"n")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_the_old_folder_comes_back_if_the_new_one_cannot_move(tmp_path, monkeypatch):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_bytes(b"o")
    rename, moved = Path.rename, []

    def second_fails(self, to):
        moved.append(to)
        if len(moved) == 2:
            raise OSError("no")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OSError, match="no"), whole_folder(target, replace=True) as folder:
        (folder / "new").write_bytes(b"n")
    assert [path.name for path in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]


def test_the_cache_is_where_the_system_wants_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "tieline"
    assert cache_folder("data") == tmp_path / "tieline" / "data"


def test_the_digest_is_sha256(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert file_digest(tmp_path / "x").startswith("ba7816bf8f01cfea")
