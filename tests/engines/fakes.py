"""An engine that needs nothing but NumPy: a worker file of a few lines, run by this Python."""

import sys
import textwrap

from tieline.engines import ENGINES, Engine, register_engine

HONEST = """
import numpy as np

def run(request, documents, tell):
    ids = np.concatenate(documents)
    logits = np.stack([np.sin(np.outer(ids + 1, np.arange(1, 7)) + layer) for layer in range(3)], 1)
    logits = logits.astype(np.float32)
    picks = np.argsort(-logits, -1, kind="stable")[..., :2].astype(np.int32)
    tell(len(documents))
    facts = {"layers": [f"model.layers.{n}.mlp.gate" for n in range(3)], "units": "logits"}
    facts |= {"dtype": "fp32", "versions": {"fake": "1"}, "settings": dict(request)}
    return {"picks": picks, "logits": logits}, facts
"""


def fake_engine(folder, monkeypatch, code=HONEST, name="fake", **facts):
    """Register an engine with this worker for the length of a test."""
    worker = folder / f"{name}.py"
    worker.write_text(textwrap.dedent(code))
    monkeypatch.setenv(f"TIELINE_{name.upper()}_PYTHON", sys.executable)
    record = Engine(name, worker, "numpy", ("numpy",), "anything", ("true",), "0 MB", **facts)
    monkeypatch.setitem(ENGINES, name, record)  # which takes it out afterwards
    del ENGINES[name]
    return register_engine(record)
