"""Commands whose output goes to a file system of a few hundred kilobytes, a device or a pipe."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.models.dense import dense_model
from tests.trace.zoo import make_trace
from tieline.trace import save_trace

SMALL = 128 << 10
FEW = ["--tokens", 128, "--calibration", 128, "--epsilon", 0.2, "--rounds", 2, "--batch-size", 2]


@pytest.fixture
def disk(tmp_path):
    """A file system of 128 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting is not allowed: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def inputs_folder(tmp_path_factory):
    """A dense model, two traces and a file of routes, each larger than the disk."""
    folder = tmp_path_factory.mktemp("made")
    dense_model("llama").save_pretrained(folder / "dense")
    for seed in (0, 1):
        save_trace(make_trace(seed, tokens=4000), folder / f"trace{seed}")
    np.save(folder / "routes.npy", np.arange(160_000).reshape(20_000, 4, 2) % 8)
    return folder


COMMANDS = {
    "inspect": ["inspect", "--tokens", 4096, "--save-trace", "@/out"],
    "merge": ["merge", "+/trace0", "+/trace1", "--renumber", "-o", "@/out"],
    "smooth": ["smooth", *FEW, "-o", "@/out"],
    "reroute": ["reroute", "--tokens", 128, "--fit-tokens", 128, "-o", "@/out"],
    "capture": ["capture", "--tokens", 4096, "--engine", "transformers", "-o", "@/out"],
    "convert": ["convert", "+/routes.npy", "@/out", "--to", "vllm"],
    "upcycle": ["upcycle", "+/dense", "--n-experts", 32, "-o", "@/out"],
    "page": ["inspect", "--tokens", 64, "--html", "@/out"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_is_said_and_nothing_is_left(tieline, disk, inputs_folder, arguments):
    code, out, err = tieline(
        *(
            str(argument).replace("@", str(disk)).replace("+", str(inputs_folder))
            for argument in arguments
        )
    )
    assert (code, out) == (2, ""), err
    assert f"no space left on the disk of {disk}" in err
    assert list(disk.iterdir()) == []


def test_a_run_that_meets_a_full_disk_goes_on_when_there_is_space(tieline, disk):
    arguments = ["train", "demo-smoke-smoe", "-o", disk / "run"]
    code, _, err = tieline(*arguments)
    assert code == 2, err
    assert f"no space left on the disk of {disk}" in err
    assert not [path for path in disk.rglob("*") if path.name.startswith((".", "checkpoint"))]
    subprocess.run(["mount", "-o", "remount,size=64M", str(disk)], check=True)
    code, _, err = tieline(*arguments, "--resume")
    assert code == 0, err


@pytest.mark.parametrize("pages", [27, 28, 29, 30])
def test_a_disk_that_is_full_after_the_weights_of_a_checkpoint_is_said(tieline, disk, pages):
    """The pages are those of 4 KiB up to the end of the weights, and the next ones."""
    subprocess.run(["mount", "-o", f"remount,size={4 * pages}k", str(disk)], check=True)
    code, _, err = tieline("train", "demo-smoke-smooth1", "-o", disk / "run")
    assert (code, f"no space left on the disk of {disk}" in err) == (2, True), err
    assert [path.name for path in (disk / "run").iterdir()] == ["config.json"]


LIMITED = """
import resource, sys
from tieline import cli

_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
for largest in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, most))
    try:
        cli.main(["train", "demo-smoke-smooth1", "-o", f"{sys.argv[1]}/{largest}"])
    except SystemExit as left:
        print("code", left.code)
"""


def test_a_limit_on_the_size_of_files_is_said(tmp_path):
    """In a process of its own, which the limits do not outlive."""
    limits = (1 << 10, 20 << 10, 120 << 10)
    command = [sys.executable, "-c", LIMITED, str(tmp_path), *map(str, limits)]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # Python would keep partly written modules
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.stdout.splitlines() == ["code 2"] * len(limits), done.stderr
    for largest in limits:
        assert f"no space left on the disk of {tmp_path / str(largest)}" in done.stderr


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_full_device_is_said_and_a_pipe_is_written_to(tieline, tmp_path, option):
    code, _, err = tieline("design", "--preset", "olmoe", f"{option}=/dev/full")
    assert (code, "no space left on the disk of /dev/full" in err) == (2, True), err
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    code, _, err = tieline("design", "--preset", "olmoe", f"{option}={pipe}")
    reader.join()
    assert code == 0, err
    assert pipe.is_fifo()
    assert read[0].startswith(b"<!doctype html>" if option == "--html" else b"{")
    assert tieline("design", "--preset", "olmoe", f"{option}=/dev/null")[0] == 0
    assert not os.path.isfile("/dev/null")


def test_a_link_stays_and_a_mode_is_kept(tieline, tmp_path):
    secret, link = tmp_path / "secret.json", tmp_path / "link.json"
    secret.touch(0o600)
    link.symlink_to(secret)
    assert tieline("design", "--preset", "olmoe", "--json", link)[0] == 0
    assert link.is_symlink()
    assert secret.stat().st_mode & 0o777 == 0o600
    assert json.loads(secret.read_text())["format"] == "tieline-design"


def test_a_disk_that_is_read_only_is_refused_before_any_work(tieline, disk):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for arguments in (["--html", disk / "a.html"], ["--save-trace", disk / "trace"]):
        code, _, err = tieline("inspect", "no/such-model", *arguments)
        assert (code, "is not writable" in err) == (2, True), err
