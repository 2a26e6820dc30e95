"""Run a worker in an engine's Python: one answer or one error, and no process left behind.

The worker gets a folder with the request and writes its answer there. It leads a process group of
its own, which is killed whatever happens here, Ctrl-C included; if this process itself is killed,
the pipe to the worker's stdin closes and the worker ends its group.
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tieline.core.errors import TielineError
from tieline.engines.engine_registry import WORKERS, Engine, environment_of

Progress = Callable[[str, int, int], None]

ANSWER = "answer.npz"
TAIL = 4000
"""Bytes of the worker's stderr that are searched for what happened."""


class EngineError(TielineError):
    """An engine is not installed, rejects a model, or did not finish."""


def run_worker(
    engine: Engine,
    python: Path,
    folder: Path,
    request: Mapping[str, Any],
    documents: Sequence[np.ndarray],
    progress: Progress | None = None,
) -> Path:
    """Run a request and return the file with the answer.

    Args:
        engine: the engine.
        python: the Python it is installed in.
        folder: an empty folder for request and answer.
        request: JSON values for the worker; the lengths of the documents are added.
        documents: token ids of each document.
        progress: called with stage, done and total.
    """
    lengths = [len(ids) for ids in documents]
    (folder / "request.json").write_text(json.dumps({**request, "lengths": lengths}))
    flat = np.concatenate([np.zeros(0, np.int64), *documents]).astype(np.int64)
    np.save(folder / "tokens.npy", flat, allow_pickle=False)
    report: dict[str, Any] = {}
    with _started_worker(engine, python, folder) as worker:
        _listen_to_worker(worker, report, lengths, progress)
        code = worker.wait()
    answer = folder / ANSWER
    if code == 0 and answer.is_file():
        return answer
    raise EngineError(_failure_message(engine, python, code, report, _stderr_tail(folder)))


@contextmanager
def _started_worker(
    engine: Engine, python: Path, folder: Path
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start a worker; its process group is killed when the block ends."""
    command = [str(python), str(WORKERS / "main.py"), str(engine.worker), str(folder)]
    with (folder / "stderr").open("wb") as stderr:
        try:
            worker = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment_of(engine, python),
                cwd=Path.cwd(),
                start_new_session=True,
            )
        except OSError as problem:
            why = problem.strerror or problem
            raise EngineError(f"engine_python: cannot run {python}: {why}") from problem
        try:
            yield worker
        finally:
            end_group(worker)


def end_group(worker: "subprocess.Popen[bytes]") -> None:
    """Kill whatever is left of a worker's process group and wait for it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    worker.wait()


def _listen_to_worker(
    worker: "subprocess.Popen[bytes]",
    report: dict[str, Any],
    lengths: Sequence[int],
    progress: Progress | None,
) -> None:
    """Read the worker's lines until it closes them: progress, or an error."""
    assert worker.stdout is not None
    total = sum(lengths)
    if progress is not None:
        progress("engine", 0, total)
    # a child of the worker may hold the pipe open after it is gone
    waiter = threading.Thread(target=_kill_group_after, args=(worker,), daemon=True)
    waiter.start()
    for line in worker.stdout:
        with suppress(ValueError):
            message = json.loads(line)
            if not isinstance(message, dict):
                continue
            report.update(message)
            done = message.get("done")
            if progress is not None and isinstance(done, int):
                progress("engine", sum(lengths[:done]), total)


def _kill_group_after(worker: "subprocess.Popen[bytes]") -> None:
    """Kill the worker's process group once the worker has ended, so that pipes close."""
    worker.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


def _stderr_tail(folder: Path) -> str:
    """The end of what a worker wrote to stderr."""
    data = (folder / "stderr").read_bytes()[-TAIL:]
    return data.decode(errors="replace")


def _failure_message(
    engine: Engine, python: Path, code: int, report: Mapping[str, Any], stderr: str
) -> str:
    """Describe why a worker gave no answer."""
    if report.get("missing"):
        return (
            f"{python} has no module {report['missing']}, which {engine.name} needs: name another "
            "Python with engine_python, or install it (tieline capture --list-engines says how)"
        )
    if report.get("error"):
        message = str(report["error"])
        has_name = message.casefold().startswith(engine.name.casefold())
        return message if has_name else f"{engine.name}: {message}"
    last = next((x.strip() for x in reversed(stderr.splitlines()) if x.strip()), "it said nothing")
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the {engine.name} worker was ended by {name}{hint}; its last words: {last:.300}"
    if code == 0:
        return f"{python} ended without an answer: is it a Python? Its last words: {last:.300}"
    return f"the {engine.name} worker left with code {code}: {last:.300}"
