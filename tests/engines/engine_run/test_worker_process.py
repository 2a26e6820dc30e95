"""Workers that are killed, fail, hang on or answer too little: one message, nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.engines.fakes import HONEST, fake_engine
from tieline.core.errors import TraceError
from tieline.engines import EngineError, capture, engine_run

IDS = [[3, 1, 4, 1, 5], [9, 2, 6]]


@pytest.fixture
def no_rest(tmp_path, monkeypatch):
    """The folder for temporary files, which must be empty afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid):
    for _ in range(200):
        if not is_running(pid):
            return
        time.sleep(0.05)
    raise AssertionError(f"{pid} still runs")


def test_an_honest_worker_is_heard(tmp_path, monkeypatch, no_rest):
    fake_engine(tmp_path, monkeypatch)
    progress_calls = []
    trace = capture(
        "any",
        engine="fake",
        ids=IDS,
        progress=lambda *arguments: progress_calls.append(arguments),
        scores=True,
    )
    assert trace.tokens.tolist() == [3, 1, 4, 1, 5, 9, 2, 6]
    assert trace.documents.tolist() == [0] * 5 + [1] * 3
    assert trace.provenance["engine"] == "fake"
    assert trace.provenance["settings"]["lengths"] == [5, 3]
    assert progress_calls == [("engine", 0, 8), ("engine", 8, 8)]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os\ndef run(*_): os.kill(os.getpid(), 9)", "ended by SIGKILL .out of memory"),
        ("import os\ndef run(*_): os._exit(7)", "left with code 7"),
        (
            "def run(*_): raise ValueError('heads of 24\\n  are not taken')",
            "ValueError: heads of 24",
        ),
        ("def run(*_): raise ValueError('heads')", "^fake: ValueError: heads$"),
        ("class EngineError(Exception): 0\ndef run(*_): raise EngineError('Fake is')", "^Fake is$"),
        ("import engine_of_nobody", "no module engine_of_nobody"),
        ("def run(*_): raise SystemExit(0)", "SystemExit"),
        ("import os\ndef run(*_): os._exit(0)", "ended without an answer"),
    ],
)
def test_a_worker_without_an_answer_is_one_message(tmp_path, monkeypatch, no_rest, code, message):
    fake_engine(tmp_path, monkeypatch, code)
    with pytest.raises(EngineError, match=message) as caught:
        capture("any", engine="fake", ids=IDS)
    assert "\n" not in str(caught.value)


def test_fewer_rows_than_tokens_are_refused(tmp_path, monkeypatch, no_rest):
    shorter = HONEST.replace('{"picks": picks', '{"picks": picks[:-1]')
    fake_engine(tmp_path, monkeypatch, shorter)
    with pytest.raises(TraceError, match="7 rows of picks for 8 tokens"):
        capture("any", engine="fake", ids=IDS)


def test_no_child_of_a_worker_outlives_it(tmp_path, monkeypatch, no_rest):
    noted = tmp_path / "pid"
    code = f"""
    import subprocess, os
    def run(*_):
        child = subprocess.Popen(["sleep", "600"])
        open({str(noted)!r}, "w").write(str(child.pid))
        os._exit(5)
    """
    fake_engine(tmp_path, monkeypatch, code)
    with pytest.raises(EngineError, match="code 5"):
        capture("any", engine="fake", ids=IDS)
    wait_until_gone(int(noted.read_text()))


def test_an_interrupt_ends_the_worker(tmp_path, monkeypatch, no_rest):
    noted = tmp_path / "pid"
    code = f"""
    import os, time
    def run(request, documents, tell):
        open({str(noted)!r}, "w").write(str(os.getpid()))
        tell(1)
        time.sleep(600)
    """
    fake_engine(tmp_path, monkeypatch, code)

    def stop(_stage, done, _total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture("any", engine="fake", ids=IDS, progress=stop)
    wait_until_gone(int(noted.read_text()))


def test_a_worker_ends_with_a_parent_that_is_killed(tmp_path):
    noted, worker = tmp_path / "pid", tmp_path / "worker.py"
    worker.write_text(
        "import os, time\n"
        "def run(*_):\n"
        f"    open({str(noted)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    parent = textwrap.dedent(f"""
        import numpy as np
        from pathlib import Path
        from tieline.engines.engine_run import run_worker
        from tieline.engines.engine_registry import Engine
        engine = Engine("x", Path({str(worker)!r}), "numpy", (), "", (), "")
        request = {{"job": "capture"}}
        python, folder = Path({sys.executable!r}), Path({str(tmp_path)!r})
        run_worker(engine, python, folder, request, [np.arange(3)])
    """)
    source = str(Path(engine_run.__file__).parents[2])
    running = subprocess.Popen(
        [sys.executable, "-c", parent], env=os.environ | {"PYTHONPATH": source}
    )
    for _ in range(600):
        if noted.is_file() and noted.read_text():
            break
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    wait_until_gone(int(noted.read_text()))


def test_what_an_engine_prints_is_no_answer(tmp_path, monkeypatch, no_rest):
    noisy = HONEST.replace("    ids =", '    print(\'{"error": "no"}\', flush=True)\n    ids =')
    fake_engine(tmp_path, monkeypatch, noisy)
    assert capture("any", engine="fake", ids=IDS).n_tokens == 8


@pytest.mark.parametrize("python", ["/bin/true", "/bin/cat"])
def test_a_program_that_is_no_python(tmp_path, monkeypatch, no_rest, python):
    fake_engine(tmp_path, monkeypatch)
    with pytest.raises(EngineError, match=r"is it a Python|left with code"):
        capture("any", engine="fake", ids=IDS, python=python)
