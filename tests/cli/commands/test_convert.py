"""tieline convert: every form from the command line, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from tieline.trace import import_trace, load_trace

ENGINES = Path(__file__).parents[2] / "trace" / "fixtures" / "engines"
SIXTEEN, TOKENS = ENGINES / "vllm-sixteen-requests.npy", ENGINES / "token-ids.npy"
NAMES = {"vllm": "a.jsonl", "sglang": "a.jsonl", "trace": "a"}


@pytest.mark.parametrize("form", ["vllm", "sglang", "verl", "megatron", "nemo", "npz", "trace"])
def test_every_form_is_written_and_read(tieline, tmp_path, form):
    target = tmp_path / NAMES.get(form, "a.safetensors" if form == "nemo" else "a.npz")
    code, out, err = tieline(
        "convert", SIXTEEN, target, "--to", form, "--ids", TOKENS, "--json", "-"
    )
    assert code == 0, err
    assert json.loads(out)["tokens"] == 4096
    again = load_trace(target) if form == "trace" else import_trace(target)
    original = import_trace(SIXTEEN, tokens=TOKENS)
    assert again.tokens.tolist() == original.tokens.tolist()
    for mine, theirs in zip(again.layers, original.layers, strict=True):
        assert mine.experts.tolist() == theirs.experts.tolist()


def test_nothing_is_written_over(tieline, tmp_path):
    target = tmp_path / "a.npz"
    assert tieline("convert", SIXTEEN, target, "--to", "npz")[0] == 0
    before = target.read_bytes()
    for arguments in ((SIXTEEN, target), (target, target, "--overwrite")):
        assert tieline("convert", *arguments, "--to", "npz")[0] == 2
        assert target.read_bytes() == before
    assert tieline("convert", SIXTEEN, target, "--to", "npz", "--overwrite")[0] == 0
    for arguments in (("--to", "tgi"), ("--to", "verl", "--model-layers", 1)):
        assert tieline("convert", SIXTEEN, tmp_path / "b.npz", *arguments)[0] == 2
        assert not (tmp_path / "b.npz").exists()
    assert tieline("convert", tmp_path / "missing.npy", tmp_path / "c", "--to", "trace")[0] == 2


def test_warm_up_is_dropped_and_counted(tieline, tmp_path):
    sound = np.load(SIXTEEN)
    dummy = np.broadcast_to(np.array([[3, 5]], sound.dtype), (300, *sound.shape[1:]))
    np.save(tmp_path / "log.npy", np.concatenate([dummy, sound]))
    arguments = ("convert", tmp_path / "log.npy", tmp_path / "a.npz", "--to", "npz")
    code, out, _ = tieline(*arguments, "--drop", "warm-up")
    assert code == 0
    assert "dropped 300 of 4,396 rows" in out
    assert import_trace(tmp_path / "a.npz").n_tokens == 4096
    code, _, err = tieline(*arguments, "--overwrite", "--drop", "everything")
    assert code == 2
    assert "'everything' cannot be dropped" in err
