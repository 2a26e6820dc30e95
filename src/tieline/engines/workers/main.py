"""Run one engine on token ids and write its routers' choices: python main.py WORKER FOLDER.

The folder holds `request.json` and `tokens.npy`; the answer is `answer.npz`, complete or absent:

    tokens, documents, positions    (T,) of the routed tokens
    picks                           (T, L, k) experts in the engine's own order
    logits                          (T, L, E) selection scores, if the engine exposes them
    weights                         (T, L, k) combine weights of the picks, if it exposes them
    logprobs                        (T, V) of the next token, on request
    facts                           JSON as bytes: layers, units, versions, settings, timings

WORKER is a file with `run(request, documents, on_document)`, which returns arrays and facts. Jobs
beside "capture" are "weights", the tensors of the model in float32 by the names of a checkpoint,
and "time", the processor seconds of the runs that the worker's `timing_runs(request, documents)`
returns by name. One line of JSON per document, and one for an error, are written to the stdout that
the parent reads; all output of the engine goes to stderr. If the parent dies, this process group is
killed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAILED = 3
"""Exit code after a reported error."""
MOST_LETTERS = 400


def split_documents(tokens: Any, lengths: list[int]) -> list[Any]:
    """Split token ids (T,) into documents of these lengths."""
    import numpy as np

    return np.split(tokens, np.cumsum(lengths, dtype=int))[:-1]


def token_keys(documents: list[Any]) -> dict[str, Any]:
    """Return token id, document and position of every token, in the order of the documents."""
    import numpy as np

    return {
        "tokens": np.concatenate(documents),
        "documents": np.repeat(np.arange(len(documents)), [len(x) for x in documents]),
        "positions": np.concatenate([np.arange(len(x)) for x in documents]),
    }


def measure_runs(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    """Measure the processor seconds of each run in alternating rounds, after one warm-up."""
    import numpy as np

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in sorted(runs, reverse=bool(turn % 2)):  # each run is first in half of the rounds
            started = time.process_time()
            runs[name]()
            if turn:
                seconds[name].append(time.process_time() - started)
    return {name: np.array(values) for name, values in seconds.items()}


def write_answer(folder: Path, worker: Any, send_message: Callable[[dict[str, Any]], None]) -> None:
    """Run the worker on the request in a folder and write its answer there."""
    import numpy as np

    request = json.loads((folder / "request.json").read_bytes())
    tokens = np.load(folder / "tokens.npy", allow_pickle=False)
    documents = split_documents(tokens, request["lengths"])
    started = time.perf_counter()
    if request["job"] == "time":
        arrays, facts = measure_runs(worker.timing_runs(request, documents), request["rounds"]), {}
    else:
        arrays, facts = worker.run(request, documents, lambda done: send_message({"done": done}))
    facts["timings"] = {**facts.get("timings", {}), "worker": time.perf_counter() - started}
    facts["python"] = sys.version.split()[0]
    if request["job"] == "capture":
        arrays = {**token_keys(documents), **arrays}
    encoded = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    unfinished = folder / "half.npz"
    np.savez(unfinished, facts=encoded, **arrays)
    unfinished.rename(folder / "answer.npz")


def load_worker(path: Path) -> Any:
    """Import a worker from its file, under a name that does not shadow the engine's package."""
    spec = importlib.util.spec_from_file_location(f"tieline_worker_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_message(problem: BaseException) -> str:
    """Return type and first three lines of an error; without the type for an `EngineError`."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    message = " ".join(lines[:3])[:MOST_LETTERS]
    return (
        message
        if type(problem).__name__ == "EngineError"
        else f"{type(problem).__name__}: {message}"
    )


def kill_group_with_parent() -> None:
    """Start a thread that kills this process group when the parent closes stdin."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    """Answer the request and return the exit code 0; an error is reported and raised."""
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if os.environ.get("TIELINE_WORKER_ALONE") is None:
        kill_group_with_parent()

    def send_message(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    try:
        write_answer(Path(sys.argv[2]), load_worker(Path(sys.argv[1])), send_message)
    except BaseException as problem:
        missing = isinstance(problem, ModuleNotFoundError) and problem.name
        send_message({"error": error_message(problem), "missing": missing or None})
        raise
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        import traceback

        traceback.print_exc()
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # engines leave threads and exit handlers behind that may hang
