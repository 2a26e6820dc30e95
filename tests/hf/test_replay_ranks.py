"""Replay in a model that transformers cuts over two processes gives what one process gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hf.tiny import batch, lively, tiny_model
from tieline.hf import capture
from tieline.hf.emulate import emulate
from tieline.hf.replay import replay
from tieline.trace import save_trace

ROOT = Path(__file__).parents[2]
LIMIT = 400.0  # seconds; only a hang takes so long


@pytest.fixture(params=["mixtral", "deepseek_v3", "gpt_oss"])
def one(request, tmp_path):
    """A saved model, routes of its int4 routers, and what one process makes of them."""
    model = lively(tiny_model(request.param)).eval()
    model.save_pretrained(tmp_path / "model")
    save_file({"ids": batch()}, tmp_path / "ids.safetensors")
    found = {}
    with torch.no_grad():
        with emulate(model, "int4", "router"), capture(model) as recorder:
            model(input_ids=batch())
        save_trace(recorder.trace(), tmp_path / "trace")
        found["plain"] = model(input_ids=batch()).logits
        for weights in ("live", "recorded"):
            with replay(model, recorder.trace(), weights) as replayed:
                found[weights] = model(input_ids=batch()).logits
    found["changed"] = torch.tensor(list(replayed.changed.values()))
    whole = sum(weight.numel() for weight in model.parameters())
    return tmp_path, found, whole


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut", ["tensor", "expert"])
def test_two_ranks_replay_as_one_process_does(one, cut):
    folder, wanted, whole = one
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "tests.hf.replay_ranks", str(folder), cut]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = load_file(folder / f"{cut}-{rank}.safetensors")
        assert found["local"] < 0.9 * whole  # it is cut
        assert torch.equal(found["changed"], wanted["changed"])
        assert wanted["changed"].sum() > 0
        for name in ("plain", "live", "recorded"):
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)
        assert (found["plain"] - found["live"]).abs().max() > 1e-4
