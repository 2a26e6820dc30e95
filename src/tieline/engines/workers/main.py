"""Run one engine on token ids and write what its routers chose: python main.py WORKER FOLDER.

The folder holds `request.json` and `tokens.npy`; the answer is `answer.npz`, complete or absent:

    tokens, documents, positions    (T,) as they were routed
    picks                           (T, L, k) experts in the engine's own order
    logits                          (T, L, E) selection scores, where the engine shows them
    weights                         (T, L, k) combine weights of the picks, where it shows them
    logprobs                        (T, V) of the next token, on request
    facts                           JSON as bytes: layers, units, versions, settings, timings

WORKER is a file with `run(request, documents, tell)`, which returns arrays and facts. Jobs beside
"capture" are "weights", the tensors of the model in float32 by the names of a checkpoint, and
"time", the processor seconds of the runs that the worker's `timing_runs(request, documents)`
returns by name. One line of JSON per document, and one for an error, go to the stdout that the
parent reads; whatever the engine prints goes to stderr. If the parent dies, this process group
ends.
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
"""Exit code after an error that was reported."""
MOST_LETTERS = 400


def documents_of(tokens: Any, lengths: list[int]) -> list[Any]:
    """Cut token ids (T,) into documents of these lengths."""
    import numpy as np

    return np.split(tokens, np.cumsum(lengths, dtype=int))[:-1]


def keys_of(documents: list[Any]) -> dict[str, Any]:
    """Ids, documents and positions of every token, in the order of the documents."""
    import numpy as np

    return {
        "tokens": np.concatenate(documents),
        "documents": np.repeat(np.arange(len(documents)), [len(x) for x in documents]),
        "positions": np.concatenate([np.arange(len(x)) for x in documents]),
    }


def timed(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    """Measure the processor seconds of each run in alternating rounds, after one warm-up."""
    import numpy as np

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in sorted(runs, reverse=bool(turn % 2)):  # no way is always the first
            started = time.process_time()
            runs[name]()
            if turn:
                seconds[name].append(time.process_time() - started)
    return {name: np.array(values) for name, values in seconds.items()}


def answer(folder: Path, worker: Any, tell: Callable[[dict[str, Any]], None]) -> None:
    """Run the worker on the request in a folder and write its answer there."""
    import numpy as np

    request = json.loads((folder / "request.json").read_bytes())
    tokens = np.load(folder / "tokens.npy", allow_pickle=False)
    documents = documents_of(tokens, request["lengths"])
    started = time.perf_counter()
    if request["job"] == "time":
        arrays, facts = timed(worker.timing_runs(request, documents), request["rounds"]), {}
    else:
        arrays, facts = worker.run(request, documents, lambda done: tell({"done": done}))
    facts["timings"] = {**facts.get("timings", {}), "worker": time.perf_counter() - started}
    facts["python"] = sys.version.split()[0]
    if request["job"] == "capture":
        arrays = {**keys_of(documents), **arrays}
    encoded = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    half = folder / "half.npz"
    np.savez(half, facts=encoded, **arrays)
    half.rename(folder / "answer.npz")


def load_worker(path: Path) -> Any:
    """Import a worker by its file; names of engines beside it are not shadowed."""
    spec = importlib.util.spec_from_file_location(f"tieline_worker_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_message(problem: BaseException) -> str:
    """Return the type and the first lines of an error."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    message = " ".join(lines[:3])[:MOST_LETTERS]
    return (
        message
        if type(problem).__name__ == "EngineError"
        else f"{type(problem).__name__}: {message}"
    )


def end_with_parent() -> None:
    """End this process group when the parent's end of stdin closes."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    """Answer the request; the exit code is 0 if there is an answer."""
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if os.environ.get("TIELINE_WORKER_ALONE") is None:
        end_with_parent()

    def tell(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    try:
        answer(Path(sys.argv[2]), load_worker(Path(sys.argv[1])), tell)
    except BaseException as problem:
        missing = isinstance(problem, ModuleNotFoundError) and problem.name
        tell({"error": error_message(problem), "missing": missing or None})
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
