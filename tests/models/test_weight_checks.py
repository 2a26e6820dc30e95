"""Weights that are no numbers, in memory and streamed."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tieline
from tieline.core.errors import TielineError
from tieline.models.demo import DEMO_FOLDER
from tieline.models.weight_checks import check_finite_tensor, is_finite_tensor

PLACES = [
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.3.mlp.experts.15.down_proj.weight",
    "model.layers.2.mlp.gate.weight",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("weight", PLACES)
@pytest.mark.parametrize("run", [tieline.inspect, tieline.audit])
def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path, run, weight, stream):
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors[weight].view(-1)[5] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    parameter = weight.replace("experts.15.down_proj.weight", "experts.down_proj")
    with pytest.raises(TielineError, match=f"weight '{parameter}.*are NaN or infinite"):
        run(folder, tokens=64, stream=stream)


def test_infinity_is_found_and_integers_pass():
    with pytest.raises(TielineError, match=r"weight 'x': 1 of 3 values .* first at \[1\]"):
        check_finite_tensor("x", torch.tensor([0.0, -torch.inf, 1.0]))
    assert is_finite_tensor(torch.arange(3))
    assert is_finite_tensor(torch.empty(0))
