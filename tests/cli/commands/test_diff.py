"""`tieline diff` from end to end: traces, engine files, models, conditions and refusals."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.analysis.planted import all_scores, renumbered, trace_of
from tieline.trace import save_trace


@pytest.fixture
def run(tieline):
    return partial(tieline, "diff")


@pytest.fixture
def traces(tmp_path):
    """Trace A, and B with other choices for four tokens of layer 1."""
    scores = all_scores(0)
    a = replace(trace_of(scores), provenance={"model": "first"})
    other = [z.clone() for z in scores]
    other[1][:4] *= -1
    b = replace(trace_of(other), provenance={"model": "second"})
    save_trace(a, tmp_path / "a")
    save_trace(b, tmp_path / "b")
    return tmp_path, a, b


def array_of(trace):
    return np.stack([x.experts[:, : x.facts.k].numpy() for x in trace.layers], axis=1)


def test_two_traces_give_a_table_a_page_and_json(traces, run):
    folder, _, _ = traces
    page, data = folder / "diff.html", folder / "diff.json"
    code, out, err = run(folder / "a", folder / "b", "--html", page, "--json", data)
    assert code == 0, err
    assert "4 of 4 first flips are wider than the noise of their own token" in " ".join(out.split())
    assert "unexplained" in out
    assert f"wrote {page}" in err
    read = json.loads(data.read_text())
    assert read["format"] == "tieline-diff"
    assert read["metrics"]["flip"] == 0.01
    assert [layer["flip"]["count"] for layer in read["layers"]] == [0, 4, 0, 0]
    assert "routing comparison" in page.read_text()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--max-flip", "1%", "--max-unexplained", "0.01"], 0, ""),
        (["--max-flip", "0.009"], 1, "failed: --max-flip 0.90 % (the worst layer has 1.0 %)"),
        (["--max-unexplained", "0"], 1, "failed: --max-unexplained 0 %"),
        (["--max-flip", "often"], 2, "--max-flip is a share such as 0.01 or 1%, got 'often'"),
        (["--max-flip", "2"], 2, "between 0 and 1"),
        (["--expect", "int3"], 2, "--expect: no format 'int3'"),
        (["--expect", "bf16"], 0, ""),
        (["--dtype-a", "bf16"], 2, "are for models"),
        (["--text", "x.txt"], 2, "a text is for two models"),
        (["--dtype-b", "int3-emulated"], 2, "no format 'int3-emulated'"),
    ],
)
def test_conditions_and_refusals_end_with_their_codes(traces, run, options, code, message):
    folder, _, _ = traces
    left, _, err = run(folder / "a", folder / "b", *options)
    assert left == code
    assert message in err
    assert "Traceback" not in err


def test_engine_files_are_aligned_and_not_attributable(traces, run):
    folder, a, b = traces
    moved, _ = renumbered(b, {0, 2}, 5)
    np.save(folder / "a.npy", array_of(a))
    dense = np.full((400, 1, 3), -1)
    array = np.concatenate([dense, array_of(moved)], axis=1)
    np.save(folder / "b.npy", array)
    code, out, err = run(folder / "a.npy", folder / "b.npy", "--json")
    assert code == 0, err
    read = json.loads(out)
    assert read["alignment"]["layer_shift"] == 1
    assert read["alignment"]["dense_b"] == ["layers.0"]
    assert sum(bool(pair["moved_experts"]) for pair in read["alignment"]["pairs"]) == 2
    assert [layer["flip"]["count"] for layer in read["layers"]] == [0, 4, 0, 0]
    assert read["layers"][0]["attribution_status"].startswith("not attributable")
    code, _, err = run(folder / "a.npy", folder / "b.npy", "--max-unexplained", "0")
    assert code == 2
    assert "not attributable: A has expert ids only" in err


def test_files_that_cannot_be_aligned_write_nothing(traces, run):
    folder, a, _ = traces
    np.save(folder / "a.npy", array_of(a))
    np.save(folder / "short.npy", array_of(a)[:100])
    np.save(folder / "few.npy", array_of(a)[:, :, :2])
    np.save(folder / "other.npy", array_of(trace_of(all_scores(99))))
    (folder / "cut.npy").write_bytes((folder / "a.npy").read_bytes()[:-100])
    page = folder / "diff.html"
    for name, message in (
        ("short.npy", "B lacks 300 of the 400 tokens of A, the first at document 0, position 100"),
        ("few.npy", "different k: layer 0 of A chooses 3"),
        ("other.npy", "cannot be aligned"),
        ("cut.npy", "cut.npy"),
        ("none.npy", "no such file"),
    ):
        code, _, err = run(folder / "a.npy", folder / name, "--html", page)
        assert (code, message in err) == (2, True), err
        assert not page.exists()
    code, _, err = run(folder / "a.npy", folder / "few.npy", "--partial")
    assert code == 0, err


def test_two_models_are_run_on_the_same_text(run):
    arguments = ["--tokens", 256, "--sequence-length", 64, "--dtype-b", "bf16-emulated", "--json"]
    code, out, err = run("demo", "demo", *arguments)
    assert code == 0, err
    read = json.loads(out)
    assert read["logits"]["kl"] > 0
    assert read["logits"]["tokens"] == 252
    assert read["alignment"]["ids_checked"] == 256
    assert read["provenance"]["b"]["emulated"] == "bf16"
    assert read["provenance"]["a"]["model"] == "demo"


def test_a_model_beside_an_engine_file_runs_on_the_tokens_of_the_file(run, tmp_path):
    from tieline.analysis.compared_sides import ModelSide, trace_model
    from tieline.models.model import Model

    loaded = Model.open()
    ids = torch.arange(3, 99).reshape(2, 48)
    trace = trace_model(ModelSide(loaded.module), list(ids))
    keys = {name: getattr(trace, name).numpy() for name in ("tokens", "documents", "positions")}
    save_file({"routed_experts": array_of(trace), **keys}, tmp_path / "engine.safetensors")
    code, out, err = run("demo", tmp_path / "engine.safetensors", "--max-flip", 0, "--json")
    assert code == 0, err
    assert json.loads(out)["alignment"]["tokens"] == 96
    np.save(tmp_path / "unknown.npy", array_of(trace))
    code, _, err = run("demo", tmp_path / "unknown.npy")
    assert code == 2
    assert "does not know its token ids" in err


def test_a_summary_is_refused(traces, run):
    from tieline.trace import save_summary, summarise

    folder, a, _ = traces
    save_summary(summarise(a), folder / "summary")
    code, _, err = run(folder / "a", folder / "summary")
    assert code == 2
    assert "is a summary: a trace with every token is needed" in err
