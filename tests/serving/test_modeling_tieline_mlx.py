"""Smoothed models in mlx-lm, where it is installed: the same tokens and scores as transformers."""

import json
import os
import subprocess

import numpy as np
import pytest
import torch

from tests.models.tiny import lively, tiny_model
from tieline.core.errors import TielineError
from tieline.engines.engine_registry import engine_named, find_python
from tieline.models.demo import load_demo_model
from tieline.models.smoothed_model import smooth_

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not os.environ.get("TIELINE_TEST_ENGINES"),
        reason="set TIELINE_TEST_ENGINES=1 (make test-engines)",
    ),
]
PROMPTS, LENGTH, NEW = 64, 12, 12
PROGRAM = """
import sys, numpy as np, mlx.core as mx
from pathlib import Path
from mlx_lm.utils import load_model
mx.set_default_device(mx.cpu)
folder, target = sys.argv[1:3]
model, _ = load_model(Path(folder), trust_remote_code=True)
ids = mx.array(np.load(target))
for _ in range(int(sys.argv[3])):
    ids = mx.concatenate([ids, model(ids)[:, -1].argmax(axis=-1)[:, None]], axis=1)
assert "tieline" not in sys.modules
np.savez(target, ids=np.array(ids), logits=np.array(model(ids)))
"""


def mlx_answer(folder, ids, new=0):
    """Tokens and logits of mlx-lm, in its own Python; its message if it refuses."""
    try:
        python = find_python(engine_named("mlx"))
    except TielineError as problem:
        pytest.skip(str(problem))
    target = folder.parent / "answer.npz"
    with target.open("wb") as stream:
        np.save(stream, ids.numpy())
    command = [str(python), "-c", PROGRAM, str(folder), str(target), str(new)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.splitlines()[-1], None
    with np.load(target) as file:
        return torch.from_numpy(file["ids"]).long(), torch.from_numpy(file["logits"])


def prompts(vocabulary, rows=PROMPTS):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, vocabulary, (rows, LENGTH), generator=generator)


@pytest.mark.parametrize("gate", ["projected", "ramp"])
def test_greedy_tokens_and_scores_are_those_of_transformers(gate, tmp_path):
    model = load_demo_model().eval()
    smooth_(model, 0.2, gate=gate)
    model.save_pretrained(tmp_path / "smoothed")
    tokens, logits = mlx_answer(tmp_path / "smoothed", prompts(500), NEW)
    with torch.inference_mode():
        expected = model(input_ids=tokens).logits
    assert torch.equal(expected[:, LENGTH - 1 : -1].argmax(dim=-1), tokens[:, LENGTH:])
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("gate", ["projected", "ramp"])
def test_other_families(family, gate, tmp_path):
    model = lively(tiny_model(family))
    smooth_(model, 0.3, gate=gate)
    model.save_pretrained(tmp_path / "smoothed")
    ids = prompts(60, 8)
    _, logits = mlx_answer(tmp_path / "smoothed", ids)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-4)


def test_what_mlx_cannot_choose_is_refused_by_name(tmp_path):
    model = lively(tiny_model("deepseek_v3"))
    smooth_(model, 0.1)
    model.save_pretrained(tmp_path / "smoothed")
    message, _ = mlx_answer(tmp_path / "smoothed", prompts(60, 2))
    assert "mlx-lm cannot run this smoothed model: its router" in message


def test_the_folder_names_its_code(tmp_path):
    model = load_demo_model().eval()
    smooth_(model, 0.2)
    model.save_pretrained(tmp_path / "smoothed")
    config = json.loads((tmp_path / "smoothed" / "config.json").read_text())
    assert (tmp_path / "smoothed" / config["model_file"]).is_file()
