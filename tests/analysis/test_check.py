"""The public `check`: sources, tokens, models, and what it reports about each."""

from pathlib import Path

import numpy as np
import pytest
import torch

import tieline as tl
from tests.trace.test_soundness import sound
from tieline.core.errors import TielineError
from tieline.models.demo import load_demo_model
from tieline.trace import import_trace

ENGINES = Path(__file__).parents[1] / "trace" / "fixtures" / "engines"
SIXTEEN, TOKENS = ENGINES / "vllm-sixteen-requests.npy", ENGINES / "token-ids.npy"


@pytest.fixture(scope="module")
def demo():
    return load_demo_model(), None


def kinds(result, severity):
    return [x.kind for x in result.findings if x.severity == severity]


def test_real_arrays_are_sound_and_their_facts_are_told():
    result = tl.check(ENGINES / "vllm-one-request.npz")
    assert result.sound
    assert kinds(result, "note") == ["row-count"]
    (file,) = result.files
    assert (file.rows, file.layers, file.k, file.dtype) == (263, 4, 2, "uint8")
    result = tl.check([str(ENGINES / "vllm-dense-layer.npz"), str(SIXTEEN)])
    assert result.sound
    assert result.metrics["files"] == 2
    assert [x.file for x in result.findings] == [str(ENGINES / "vllm-dense-layer.npz")]


@pytest.fixture(scope="module")
def run(demo):
    """Routes of the demo model on the tokens, as an engine would return them."""
    with torch.no_grad(), tl.capture(demo[0], distances=False, epsilons=()) as recorder:
        for ids in np.load(TOKENS):
            row = torch.from_numpy(ids.astype(np.int64))[None].to(demo[0].device)
            demo[0](input_ids=row, use_cache=False)
    return np.stack([x.experts[:, : x.facts.k].numpy() for x in recorder.trace().layers], 1)


def test_a_model_agrees_with_its_own_run(demo, run):
    result = tl.check(run.astype(np.uint8), tokens=TOKENS, model=demo)
    assert result.sound
    assert [x for x in result.findings if x.severity != "note"] == []
    assert result.compared == 2048
    assert result.model == "OlmoeForCausalLM"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda x: np.roll(x, 1, axis=0), "token-shift"),
        (lambda x: x[:, ::-1], "layer-shift"),
        (lambda x: x[:, 1:], "layer-shift"),
        (lambda x: np.where(x == 3, x.max() + 1, x), "out-of-range"),
        (lambda x: (x + 3) % (x.max() + 1), "out-of-range"),
        (lambda x: x * 0, "all-zero"),
    ],
)
def test_a_model_names_the_fault(demo, run, change, kind):
    array = change(run.astype(np.int64))
    result = tl.check(array, tokens=np.load(TOKENS), model=demo)
    assert not result.sound
    assert kind in kinds(result, "unsound")


def test_a_common_row_under_the_tokens_of_another_text_is_no_stale_row():
    ids, tokens = sound(600, 2, 2, vocabulary=60)
    ids[tokens < 5] = ids[0]
    assert tl.check(ids, tokens=tokens).sound
    other = np.random.default_rng(0).permutation(tokens)
    assert kinds(tl.check(ids, tokens=other), "unsound") == ["token-shift"]
    ids[300:340] = ids[0]
    assert "repeated-rows" in kinds(tl.check(ids, tokens=other), "unsound")


def test_another_file_is_a_reference_too():
    array = np.load(SIXTEEN)
    assert tl.check(array, against=SIXTEEN).sound
    moved = tl.check(array[:, [1, 0, 2, 3]], against=SIXTEEN)
    assert kinds(moved, "unsound") == ["layer-shift"]
    assert moved.reference == str(SIXTEEN)


def test_traces_and_their_folders_are_checked(tmp_path):
    trace = import_trace(SIXTEEN, tokens=TOKENS)
    assert tl.check(trace).sound
    trace.save(tmp_path / "t")
    result = tl.check(tmp_path / "t")
    assert result.sound
    assert result.files[0].producer == "trace"


def test_a_result_is_saved_and_read_again(tmp_path):
    array = np.load(SIXTEEN)[:256].copy()
    array[100:120] = 0
    result = tl.check(array, n_experts=16)
    result.to_json(tmp_path / "a.json")
    again = tl.load(tmp_path / "a.json")
    assert again == result
    assert not again.sound
    assert again.findings[0].kind == "all-zero"
    assert "Unsound" in repr(again)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("missing.npy", {}, "no such file or folder"),
        (3, {}, "a path, an array or an answer"),
        ([], {}, "at least one file"),
        (np.zeros((2, 2), int), {}, "integers of shape"),
        (SIXTEEN, {"model": "demo"}, "needs the token ids"),
        (SIXTEEN, {"tokens": np.full((16, 256), 9999), "model": "demo"}, "not one of the model's"),
        (SIXTEEN, {"format": "tgi"}, "no format is called"),
    ],
)
def test_what_cannot_be_checked_is_refused(source, options, message):
    with pytest.raises(TielineError, match=message):
        tl.check(source, **options)


@pytest.mark.parametrize("number", [1 << 16, 1 << 32, 1 << 62])
@pytest.mark.parametrize("n_experts", [None, 16])
def test_ids_beyond_any_model_are_refused_and_not_counted(number, n_experts, tmp_path):
    array = np.load(SIXTEEN).astype(np.int64)
    array[0, 0, 0] = number
    np.save(tmp_path / "routes.npy", array)
    for given in (array, tmp_path / "routes.npy"):
        with pytest.raises(TielineError, match=f"the id {number:,}, and no model has over 65,536"):
            tl.check(given, n_experts=n_experts)
    with pytest.raises(TielineError, match="no model has over 65,536"):
        tl.check(SIXTEEN, against=array)
