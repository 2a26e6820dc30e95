"""Files are whole or absent, whatever happens while they are written."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tieline.core import files
from tieline.core.errors import NoSpaceError, ParameterError, TielineError
from tieline.core.files import (
    TakenError,
    cache_folder,
    check_folder,
    check_target,
    file_digest,
    locked_folder,
    out_of_space,
    remove_leftovers,
    whole_folder,
    would_overwrite,
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
    with pytest.raises(NoSpaceError, match=r"no space left on the disk of .*report\.html"):
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
    complete_files = {name * 4_000_000 for name in (b"a", b"b")}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(40):
            time.sleep(0.004)
            assert not target.exists() or target.read_bytes() in complete_files
        writer.send_signal(signal.SIGKILL)
    assert not target.exists() or target.read_bytes() in complete_files
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

    monkeypatch.setattr(files, "_exchange_folders", lambda half, target: False)
    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OSError, match="no"), whole_folder(target, replace=True) as folder:
        (folder / "new").write_bytes(b"n")
    assert [path.name for path in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_keeps_its_mode_and_is_never_more_open_on_the_way(tmp_path, monkeypatch):
    target, modes = tmp_path / "secret.json", []
    target.touch(0o600)
    monkeypatch.setattr(os, "fsync", lambda handle: modes.append(os.fstat(handle).st_mode & 0o777))
    write_whole(target, b"new")
    assert (target.stat().st_mode & 0o777, modes) == (0o600, [0o600])
    write_whole(tmp_path / "new.json", b"x")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "new.json").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_full_device_is_named():
    with pytest.raises(NoSpaceError, match="no space left on the disk of /dev/full"):
        write_whole(Path("/dev/full"), b"x" * 100_000)


def test_an_open_file_is_written_to_and_not_replaced(tmp_path):
    target = tmp_path / "redirected"
    with target.open("wb") as file:
        write_whole(Path(f"/dev/fd/{file.fileno()}"), b"through")
        file.seek(0, os.SEEK_END)
        file.write(b", and on")
    assert target.read_bytes() == b"through, and on"


HOLDER = """
import sys, time
from pathlib import Path
from tieline.core.files import whole_folder
with whole_folder(Path(sys.argv[1])) as half:
    (half / "weights").write_bytes(b"half")
    print("holding", flush=True)
    time.sleep(600)
"""


def test_rests_of_killed_processes_are_removed_and_those_of_others_are_not(tmp_path):
    target = tmp_path / "model"
    other = tmp_path / ".model.not-ours.partial"
    other.touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(target)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        (half,) = (path for path in tmp_path.iterdir() if path.is_dir())
        remove_leftovers(target)
        assert (half / "weights").exists()
        holder.send_signal(signal.SIGKILL)
    with whole_folder(target) as folder:
        assert not half.exists()
        (folder / "weights").write_bytes(b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"model", other.name}


def test_a_folder_that_was_moved_aside_comes_back(tmp_path):
    aside = tmp_path / ".model.0123456789abcdef.old.partial"
    aside.mkdir()
    (aside / "weights").write_bytes(b"old")
    remove_leftovers(tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_bytes() == b"old"
    assert not aside.exists()


def test_links_named_like_rests_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    link = tmp_path / ".model.0123456789abcdef.partial"
    link.symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / ".model.fedcba9876543210.partial")
    remove_leftovers(tmp_path / "model")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_behind_a_link_is_filled_and_the_link_stays(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    for text in (b"one", b"two"):
        with whole_folder(link, replace=True) as folder:
            (folder / "weights").write_bytes(text)
        assert link.is_symlink()
        assert (tmp_path / "real" / "weights").read_bytes() == text


def test_a_failed_folder_takes_the_parents_that_it_made_with_it(tmp_path):
    with pytest.raises(RuntimeError):
        failing_folder(tmp_path / "a" / "b" / "model")
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_refused(tmp_path):
    loop, dangling = tmp_path / "loop", tmp_path / "dangling"
    loop.symlink_to(loop)
    dangling.symlink_to(tmp_path / "nowhere" / "file")
    (tmp_path / "file").touch()
    for path in (loop, dangling):
        with pytest.raises(ParameterError, match=r"leads nowhere|there is no folder"):
            check_target(path)
    with pytest.raises(ParameterError, match="is not a folder"):
        check_folder(tmp_path / "file" / "model")
    with pytest.raises(ParameterError, match="mount point"):
        check_folder(Path("/"))
    check_folder(tmp_path / "new" / "model")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to everything")
def test_read_only_places_are_refused(tmp_path):
    target = tmp_path / "a.json"
    target.touch(0o400)
    with pytest.raises(ParameterError, match="read-only"):
        check_target(target)


def test_an_output_is_found_to_be_an_input(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "link").symlink_to(model)
    for output in (model, tmp_path / "link", tmp_path, model / ".." / "model"):
        assert would_overwrite(output, model)
    for output in (tmp_path / "models", model / "page.html"):
        assert not would_overwrite(output, model)


@pytest.mark.parametrize(
    ("problem", "full"),
    [
        (OSError(28, "No space left on device"), True),
        (OSError(122, "Disk quota exceeded"), True),
        (OSError(27, "File too large"), True),
        (RuntimeError("I/O error: File too large (os error 27)"), True),
        (RuntimeError("Error while serializing: I/O error: No space left (os error 28)"), True),
        (OSError(2, "No such file"), False),
        (TielineError("no such file: No space left on device"), False),
    ],
)
def test_a_full_disk_is_known_by_any_library_s_words(problem, full):
    assert out_of_space(problem) is full
    outer = RuntimeError("the checkpoint was not written")
    outer.__cause__ = problem
    assert out_of_space(outer) is full


def test_the_cache_is_where_the_system_wants_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "tieline"
    assert cache_folder("data") == tmp_path / "tieline" / "data"


def test_the_digest_is_sha256(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert file_digest(tmp_path / "x").startswith("ba7816bf8f01cfea")


def filled(target, meanwhile, **options):
    """Write a folder with the file "weights", and call `meanwhile` before it is finished."""
    with whole_folder(target, **options) as half:
        (half / "weights").write_bytes(b"w")
        meanwhile()


def thesis(target):
    target.mkdir()
    (target / "thesis").write_bytes(b"mine")


def test_a_folder_made_meanwhile_is_left_alone(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(TakenError, match="not empty: another process wrote it meanwhile"):
        filled(target, lambda: thesis(target))
    assert [path.name for path in target.iterdir()] == ["thesis"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_where_the_folder_was_to_be_is_left_alone(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(TakenError, match="exists"):
        filled(target, lambda: target.write_bytes(b"mine"), replace=True)
    assert target.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_folder_of_another_kind_is_not_replaced(tmp_path, monkeypatch, exchange, late):
    """`late`: the file appears between the last check of the folder and the rename."""
    if not exchange:
        monkeypatch.setattr(files, "_exchange_folders", lambda half, target: False)
    target, answers = tmp_path / "model", iter([True] if late else [])

    def kind(folder):
        return next(answers, (folder / "weights").exists())

    with pytest.raises(TakenError):
        filled(target, lambda: thesis(target), replace=True, kind=kind)
    assert (target / "thesis").read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [target]
    (target / "weights").write_bytes(b"old")
    filled(target, lambda: None, replace=True, kind=kind)
    assert [path.read_bytes() for path in target.iterdir()] == [b"w"]
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("means", ["rename", "link", "neither"])
def test_a_file_made_meanwhile_is_left_alone(tmp_path, monkeypatch, means):
    def refused(*names):
        raise OSError(errno.ENOSYS, "not here")

    if means != "rename":
        monkeypatch.setattr(files, "_renameat2", refused)
    if means == "neither":
        monkeypatch.setattr(os, "link", refused)
    target = tmp_path / "a.json"
    write_whole(target, b"first", replace=False)
    with pytest.raises(TakenError, match=r"a\.json exists: another process wrote it meanwhile"):
        write_whole(target, b"second", replace=False)
    assert target.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [target]
    write_whole(target, b"third")
    assert target.read_bytes() == b"third"


RACER = """
import sys
from pathlib import Path
from tieline.core.files import TakenError, whole_folder, write_whole
kind, name, place = sys.argv[1:]
for number in range(50):
    target = Path(place) / f"{kind}{number}"
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        if kind == "file":
            write_whole(target, name.encode(), replace=False)
        else:
            with whole_folder(target) as half:
                (half / "name").write_text(name)
        print("wrote", flush=True)
    except TakenError:
        print("left", flush=True)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_one_of_two_writers_writes(tmp_path, kind):
    command = [sys.executable, "-c", RACER, kind]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers: dict[str, Any] = {
        name: subprocess.Popen([*command, name, tmp_path], **pipes) for name in "ab"
    }
    for number in range(50):
        for writer in writers.values():
            assert writer.stdout.readline() == "ready\n"
        for writer in writers.values():
            writer.stdin.write("\n")
            writer.stdin.flush()
        ends = {name: writer.stdout.readline().strip() for name, writer in writers.items()}
        assert sorted(ends.values()) == ["left", "wrote"]
        target = tmp_path / f"{kind}{number}"
        text = (target if kind == "file" else target / "name").read_text()
        assert ends[text] == "wrote"
    for writer in writers.values():
        writer.communicate()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_files_of_a_folder_follow_the_umask(tmp_path, mask):
    original = tmp_path / "original"
    original.touch(0o600)
    before = os.umask(mask)
    try:
        with whole_folder(tmp_path / "model") as half:
            (half / "config").touch()
            (half / "weights").touch(0o600)  # as safetensors leaves them
            os.link(original, half / "linked")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert modes == {"config": 0o666 & ~mask, "weights": 0o666 & ~mask, "linked": 0o600}


def test_an_empty_folder_that_is_filled_keeps_its_mode(tmp_path):
    target = tmp_path / "model"
    target.mkdir(0o700)
    with whole_folder(target) as half:
        (half / "weights").touch()
    assert target.stat().st_mode & 0o777 == 0o700


def test_a_folder_is_held_by_one_process(tmp_path):
    target = tmp_path / "runs" / "one"
    code = "import sys; from pathlib import Path; from tieline.core.files import locked_folder\n"
    code += "with locked_folder(Path(sys.argv[1])): print('held')"
    command = [sys.executable, "-c", code, str(target)]
    with locked_folder(target):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"another process writes to {target}: wait until it ends" in done.stderr
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == "held\n"
    with pytest.raises(RuntimeError), locked_folder(tmp_path / "new" / "run"):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_missing_folder_among_streams_is_refused_before_any_work():
    with pytest.raises(TielineError, match="there is no folder /proc/none"):
        files.check_target(Path("/proc/none/x.json"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc and /sys of Linux")
@pytest.mark.parametrize("folder", ["/proc", "/sys"])
def test_a_place_in_which_nothing_can_be_made_is_refused_whoever_asks(folder):
    with pytest.raises(TielineError, match=f"{folder} is not writable"):
        check_folder(Path(folder) / "new")
    if folder != "/proc":  # whose names are those of open files
        with pytest.raises(TielineError, match=f"{folder} is not writable"):
            check_target(Path(folder) / "new.json")


@pytest.mark.parametrize("nameless", [True, False])
def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path, monkeypatch, nameless):
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE")
    check_target(tmp_path / "a.json")
    check_folder(tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []
