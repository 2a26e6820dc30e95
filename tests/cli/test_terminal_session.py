"""How a run ends: Ctrl-C at any moment, closed pipes, full devices and plain terminals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.tiers import slow
from tieline.cli.terminal_session import _ascii_spelling
from tieline.models.demo import DEMO_FOLDER

TIELINE = [sys.executable, "-m", "tieline"]


def run(*arguments, **options):
    options = {"capture_output": True, "text": True, "check": False} | options
    return subprocess.run([*TIELINE, *arguments], **options)


def started(*arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options |= {"start_new_session": True, "preexec_fn": _heeds_ctrl_c}
    return subprocess.Popen([*TIELINE, *arguments], **pipes, **options)


def _heeds_ctrl_c():
    """A shell ignores Ctrl-C in what it runs in the background, and tests may be run there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def messages(err):
    """Lines on stderr without progress lines, which end in seconds."""
    return [line for line in err.splitlines() if not line.endswith(" s")]


@pytest.mark.parametrize("seconds", [0.4, 1.2, 2.0, 3.0, 5.0])
def test_ctrl_c_at_any_moment_is_one_word(seconds, tmp_path):
    with started("inspect", "--tokens", "300000", "--save-trace", tmp_path / "trace") as process:
        time.sleep(seconds)  # from the first imports to the forward passes
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, messages(err)) == (130, "", ["stopped"])
    assert list(tmp_path.iterdir()) == []


COLLECTOR_IN_A_SESSION = """
import gc, sys
from tieline.cli.terminal_session import open_terminal_session, uncollected_imports

with open_terminal_session(ends_process=sys.argv[1] == "ends"):
    with uncollected_imports():
        inside = gc.isenabled()
print(inside, gc.isenabled(), gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(
    ("process", "collector"), [("ends", "False True True"), ("goes on", "True True False")]
)
def test_garbage_is_left_during_imports_where_the_process_ends(process, collector):
    command = [sys.executable, "-c", COLLECTOR_IN_A_SESSION, process]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == collector


STOPPED_INSIDE_EXECUTED_TEXT = """
from tieline.cli.terminal_session import open_terminal_session

def interrupted():
    raise KeyboardInterrupt

with open_terminal_session(ends_process=True):
    try:
        exec("interrupted()")
    except KeyboardInterrupt:
        raise SystemExit(130)
"""


def test_ctrl_c_in_the_executed_text_of_a_library_keeps_the_exit_code(tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED_INSIDE_EXECUTED_TEXT)
    done = subprocess.run([sys.executable, "-m", "stopped"], cwd=tmp_path, check=False)
    assert done.returncode == 130


def test_ctrl_c_stops_the_processes_of_a_study_without_a_word_of_theirs(tmp_path):
    rows = tmp_path / "rows"
    arguments = ["linear", "--link", "softmax", "--expert", "linear", "--sizes", "2000,4000"]
    study = [
        "rates",
        "--gate",
        *arguments,
        "--repetitions",
        "400",
        "--jobs",
        "2",
        "--results",
        rows,
    ]
    with started(*study) as process:
        while not rows.exists():
            time.sleep(0.05)
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (130, "stopped")
    assert "Traceback" not in err


LIST = ("train", "--list")


@pytest.mark.parametrize(
    "arguments", [LIST, ("rates", "--list"), ("--help",), (*LIST, "--json", "-")]
)
def test_a_closed_pipe_is_no_error(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    done = run(*arguments, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, messages(done.stderr)) == (0, [])


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-", slow("<&-"), slow("2>&-")])
def test_a_closed_stream_is_no_error(closed, tmp_path):
    page = tmp_path / "page.html"
    command = f'exec "$0" -m tieline design --preset olmoe --html "$1" {closed}'
    arguments = ["sh", "-c", command, sys.executable, str(page)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, "bug of" in done.stderr, "Traceback" in done.stderr) == (
        0,
        False,
        False,
    )
    assert page.read_text().startswith("<!doctype html>")
    assert page.read_text().rstrip().endswith("</html>")


@pytest.mark.parametrize("arguments", [LIST, (*LIST, "--json", "-"), ("--version",)])
def test_a_full_stdout_is_an_error(arguments):
    with open("/dev/full", "w") as full:
        done = run(*arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert "o space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_without_unicode_gets_plain_letters():
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "COLUMNS": "100"}
    done = run("design", "--preset", "olmoe", env=plain)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "Phi(kH" in done.stdout


@pytest.mark.parametrize(
    ("sign", "plain"),
    [
        ("ε", "eps"),
        ("τ", "tau"),
        ("Φ", "Phi"),
        ("·", "-"),
        ("é", "e"),
        ("⌊", "floor("),
        ("字", "?"),
    ],
)
def test_signs_are_spelled(sign, plain):
    assert _ascii_spelling(sign) == plain


def test_a_power_of_ten_stays_one():
    assert "1·10⁻³".encode("ascii", "tieline.plain") == b"1-10^-3"


def test_names_that_are_no_text_are_printed(tieline, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff\x1b[31m.npy"
    command = [*TIELINE, "merge", name, name, "-o", tmp_path / "whole"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"\\udcff" in done.stderr
    assert b"\x1b" not in done.stderr
    code, _, err = tieline("diff", os.fsdecode(name), os.fsdecode(name))
    assert code == 2
    assert "no such file" in err
    assert "\x1b" not in err


EVIL = "evil\x1b[31m\x1b]52;c;QUFB\x07\x1b]8;;x\x07\r\u202e\u2066\x9b1m\x01"


def refused_names(folder):
    """Commands about files whose name or content is hostile."""
    archive, empty, other = (folder / f"{EVIL}{end}" for end in (".npz", ".jsonl", ""))
    np.savez(archive, **{EVIL: np.zeros((4, 2, 2), dtype=np.int64)})
    empty.write_text(json.dumps({EVIL: EVIL}) + "\n")
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": EVIL, "architectures": [EVIL]}))
    (folder / "result.json").write_text(json.dumps({"format": EVIL, "version": EVIL}))
    tensors = {EVIL: torch.zeros(2, 2)}
    save_file(tensors, folder / "t.safetensors", metadata={EVIL: EVIL, "format": EVIL})
    return [
        ("check", archive),
        ("diff", archive, archive),
        ("check", empty),
        ("inspect", other),
        ("inspect", folder / "result.json"),
        ("check", folder / "t.safetensors"),
        ("inspect", "demo", EVIL),
        ("inspect", "demo", f"--{EVIL}"),
        ("inspect", "demo", "--text", folder / f"{EVIL}.txt"),
        ("inspect", "demo", "--fail-if", EVIL),
        ("merge", archive, archive, "-o", folder / f"{EVIL}.out"),
    ]


@pytest.mark.parametrize("number", range(11))
def test_no_name_and_no_file_acts_on_the_terminal(tieline, tmp_path, number):
    code, out, err = tieline(*refused_names(tmp_path)[number])
    assert code in (1, 2), err
    assert [c for c in out + err if c not in "\n\t" and not c.isprintable()] == []
    assert "a bug of tieline" not in err


@pytest.mark.filterwarnings("default::tieline.core.errors.PrecisionWarning")
def test_a_model_and_its_result_of_a_hostile_name_are_shown_in_plain_letters(tieline, tmp_path):
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / EVIL)
    few, saved, page = ["--tokens", 64, "--no-jumps"], tmp_path / "a.json", tmp_path / "a.html"
    runs = [("inspect", folder, *few, "--json", saved), ("inspect", saved, "--html", page)]
    runs += [("inspect", folder, *few), ("audit", folder, *few[:2], "--formats", "bf16")]
    for arguments in runs:
        code, out, err = tieline(*arguments)
        assert code == 0, err
        assert [c for c in out + err if c not in "\n\t" and not c.isprintable()] == []
    assert not set(page.read_text()) & set("\x1b\x07\u202e\u2066\x9b")


def test_a_name_with_a_line_end_is_no_message_of_its_own(tieline, tmp_path):
    code, _, err = tieline("diff", tmp_path / "a\nwrote b", "demo")
    assert code == 2
    assert "\nwrote" not in err


@pytest.fixture
def design(tieline, monkeypatch):
    """The table of `tieline design` on a terminal with this number of columns."""

    def shown(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        return tieline("design", "--preset", "olmoe")[1]

    return shown


def test_forty_columns_show_whole_numbers(design):
    wide, narrow = design(400), design(40)
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= 40
    table = wide[wide.index("experts N") : wide.index("flips bf16")]
    numbers = [word for word in table.split() if word[0].isdigit()]
    assert len(numbers) > 20
    assert all(number in narrow for number in numbers)


def test_what_is_to_be_tested_is_said_before_and_while_it_goes_on(tieline, tmp_path):
    arguments = ["p0-lem6.2", "--fast", "--executor", "serial", "--results", tmp_path / "results"]
    code, _, err = tieline("reproduce", *arguments)
    assert "1 claim of 1 paper in 1 process: about" in err
    assert code == 0


def test_text_comes_from_stdin_and_pages_go_to_stdout(tieline, tmp_path, monkeypatch):
    (tmp_path / "piped").write_text("Once upon a time there was a router. " * 20)
    with (tmp_path / "piped").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, out, err = tieline("inspect", "--text", "-", "--tokens", "64", "--html", "-")
    assert code == 0, err
    assert out.startswith("<!doctype html>")
    assert "stdin" in out
    assert "wrote" not in err
