"""tieline.engines.engine_run: what it asks of a worker and what it refuses before starting one."""

import numpy as np
import pytest
import torch

import tieline as tl
from tests.engines.fakes import HONEST, fake_engine
from tieline.core.errors import TielineError, TraceError
from tieline.engines import RunOptions, dequantised_weights, run_engine
from tieline.engines.engine_run import usable_threads
from tieline.trace import load_trace, save_trace


def test_the_trace_is_one_like_any_other(tmp_path, monkeypatch):
    fake_engine(tmp_path, monkeypatch)
    rows = [torch.tensor([1, 2, 3]), np.array([4, 5], np.uint8)]
    trace = tl.engines.capture("any", engine="fake", ids=rows)
    save_trace(trace, tmp_path / "trace")
    again = load_trace(tmp_path / "trace")
    assert again.provenance == trace.provenance
    assert tl.diff(trace, again).metrics["flip"] == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no tokens"),
        ([[]], "document 0"),
        ([[1, -2]], "document 0"),
        ([[1], [1.5]], "document 1"),
        ([[[1]]], "document 0"),
    ],
)
def test_bad_ids_start_nothing(tmp_path, monkeypatch, ids, message):
    fake_engine(tmp_path, monkeypatch, "raise RuntimeError('started')")
    with pytest.raises(TielineError, match=message):
        tl.engines.capture("any", engine="fake", ids=ids)


def test_precisions_and_models_of_other_kinds_are_refused(tmp_path, monkeypatch):
    fake_engine(tmp_path, monkeypatch)
    with pytest.raises(TielineError, match="'bf16' is not computed by fake"):
        tl.engines.capture("any", engine="fake", ids=[[1]], dtype="bf16")
    with pytest.raises(TielineError, match="takes anything"):
        tl.engines.capture("model.gguf", engine="fake", ids=[[1]])
    with pytest.raises(TielineError, match="takes a GGUF file"):
        tl.engines.capture("folder", engine="llama.cpp", ids=[[1]])


def test_a_file_with_other_words_is_of_another_model(tmp_path, monkeypatch):
    code = HONEST.replace('"dtype": "fp32"', '"dtype": "fp32", "words": ["a", "x", "y"]')
    fake_engine(tmp_path, monkeypatch, code)
    run_engine("any", "fake", [[1]], RunOptions(vocabulary={1: "a", 2: "x", 7: "c"}))
    with pytest.raises(TraceError, match=r"2 of 3 tokens have another text.*another model"):
        run_engine("any", "fake", [[1]], RunOptions(vocabulary={1: "a", 2: "b", 7: "c"}))


def test_weights_that_are_missing_are_named(tmp_path, monkeypatch):
    code = """
    import numpy as np
    def run(request, documents, tell):
        assert request["job"] == "weights" and documents == []
        return {"a.weight": np.ones((2, 2), np.float32)}, {"bits": 4.5}
    """
    fake_engine(tmp_path, monkeypatch, code)
    weights, facts = dequantised_weights("any", "fake", ["a.weight"])
    assert weights["a.weight"].sum() == 4
    assert facts["bits"] == 4.5
    with pytest.raises(TraceError, match=r"no \['b.weight'\]"):
        dequantised_weights("any", "fake", ["a.weight", "b.weight"])


def test_threads_follow_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert usable_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "none")
    assert usable_threads() >= 1
