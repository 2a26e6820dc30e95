"""Commands under torchrun: which rank writes and reports errors, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.commands.test_torchrun import torchrun
from tieline.cli.torchrun import (
    claims_error_report,
    is_main_process,
    joined_processes,
    started_by_torchrun,
)
from tieline.core.errors import ParameterError
from tieline.models.demo import demo_text

STARTED = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def started_as(monkeypatch, rank):
    for name, value in {**STARTED, "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr("tieline.cli.torchrun.REPORT_WAIT", 0.0)


def test_one_process_is_first_and_reports_errors(monkeypatch):
    for name in ("RANK", *STARTED):
        monkeypatch.delenv(name, raising=False)
    assert not started_by_torchrun()
    assert is_main_process()
    assert claims_error_report()
    with joined_processes(None, "testing") as way:
        assert way is None


def test_a_way_without_torchrun_is_refused(monkeypatch):
    for name in ("RANK", *STARTED):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(ParameterError, match="--parallel tp needs several processes: start with"),
        joined_processes("tp", "testing"),
    ):
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_writes_and_speaks_where_torchrun_keeps_no_store(monkeypatch, rank):
    started_as(monkeypatch, rank)
    assert started_by_torchrun()
    assert is_main_process() == (rank == 0)
    assert claims_error_report() == (rank == 0)


def error_lines(output):
    return [line for line in output.splitlines() if line.startswith(("error", "this is a bug"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "way", "message"),
    [
        (2, "xx", "must be one of data, tp, ep, pp, fsdp, got 'xx'"),
        (3, "ep", "16 experts of 'olmoe' cannot be cut over 3 processes"),
        (3, "tp", "64 intermediate features of an expert of 'olmoe' cannot be cut over 3"),
    ],
)
def test_what_cannot_be_is_told_once_and_nothing_is_written(tmp_path, count, way, message):
    page = tmp_path / "page.html"
    code, output = torchrun(count, "inspect", "--parallel", way, "--tokens", 512, "--html", page)
    assert code == 1
    assert len(error_lines(output)) == 1, output
    assert message in error_lines(output)[0]
    assert "exitcode  : 2" in output
    assert not page.exists()


@pytest.mark.slow
def test_a_page_of_two_processes_is_that_of_one(tmp_path):
    page, record = tmp_path / "page.html", tmp_path / "two.json"
    options = ["--tokens", 1024, "--batch-size", 1]
    code, output = torchrun(2, "inspect", *options, "--html", page, "--json", record)
    assert code == 0, output
    assert output.count(f"wrote {page}") == 1
    alone = tmp_path / "one.json"
    command = [sys.executable, "-m", "tieline", "inspect", *map(str, options), "--json", str(alone)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    alone_metrics, metrics = (json.loads(path.read_bytes())["metrics"] for path in (alone, record))
    assert alone_metrics == metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "way", "message"),
    [
        (["audit"], "tp", "--parallel 'tp': an audit emulates low precision, and matrices are cut"),
        (["audit", "--budget-minutes", 1], "data", "--budget-minutes goes by the clock of one"),
        (["smooth"], "ep", "--parallel 'ep': smoothing compares a whole model with a whole copy"),
        (["diff", "demo", "demo", "--dtype-b", "int8-emulated"], "fsdp", "of B emulates low"),
        (["capture", "--engine", "vllm"], "data", "vllm runs by itself"),
    ],
)
def test_commands_refuse_what_processes_cannot_share_once(tmp_path, arguments, way, message):
    page = tmp_path / "page.json"
    folder_option = ["-o", tmp_path / "made"] if arguments[0] in ("capture", "smooth") else []
    code, output = torchrun(2, *arguments, *folder_option, "--parallel", way, "--json", page)
    assert code == 1
    assert len(error_lines(output)) == 1, output
    assert message in error_lines(output)[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "stage"),
    [
        (["inspect"], "forward"),
        (["capture", "-o"], "forward"),
        (["diff", "demo", "demo", "--dtype-b", "bf16"], "forward"),
        (["audit"], "audit"),
        (["smooth", "-o"], "repair"),
    ],
)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_other_with_one_message(
    tmp_path, tmp_path_factory, arguments, stage, lost
):
    log = tmp_path / "log"
    program = Path(sys.executable).with_name("torchrun")
    options = [*arguments[1:], *([str(tmp_path / "made")] if "-o" in arguments else [])]
    options += ["--tokens", "60000", "--html", str(tmp_path / "page.html")]
    if (
        arguments[0] == "capture"
    ):  # nothing but forward passes: more text, so that it is not over soon
        text = tmp_path_factory.mktemp("text") / "long.txt"
        text.write_text(10 * demo_text())
        options += ["--tokens", "600000", "--text", str(text)]
    else:
        options += ["--batch-size", "1"]
    command = [str(program), "--nproc-per-node", "2", "-m", "tieline", arguments[0], *options]
    with log.open("w") as log_file:
        started = subprocess.Popen(
            command,
            stdout=log_file,
            stderr=log_file,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            until = time.monotonic() + 300
            while stage not in log.read_text() and time.monotonic() < until:
                time.sleep(0.2)
            children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
            os.kill(int(children[lost]), signal.SIGKILL)
            assert started.wait(120) == 1
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
    last = error_lines(log.read_text())
    assert len(last) == 1, log.read_text()
    assert "died" in last[0]
    assert "nothing was written" in last[0]
    assert list(tmp_path.iterdir()) == [log]
