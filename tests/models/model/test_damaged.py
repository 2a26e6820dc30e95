"""Checkpoints with NaN weights, missing parts or no tokenizer: each is named."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import lively, tiny_model
from tieline.analysis.audit import audit
from tieline.core.errors import UnsupportedModelError
from tieline.models.demo import load_demo_tokenizer
from tieline.models.model import Model, check_finite_weights, load_dense

WORDS = 512
PARTS = {
    "head": "lm_head.weight",
    "embedding": "model.embed_tokens.weight",
    "expert": "model.layers.1.mlp.experts.down_proj",
    "norm": "model.norm.weight",
    "router": "model.layers.0.mlp.gate.weight",
}


@pytest.fixture(scope="module")
def model():
    return lively(tiny_model("olmoe", vocab_size=WORDS))


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="64KB")
    load_demo_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def _change(folder, name, change):
    """Rewrite the file that holds a tensor."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            change(tensors)
            save_file(tensors, file, metadata={"format": "pt"})
            return
    raise AssertionError(name)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_number_is_named(model, part, value):
    tensor = model.get_parameter(PARTS[part])
    index = (0,) * (tensor.ndim - 1) + (3,)
    before = tensor[index].clone()
    tensor[index] = value
    try:
        with pytest.raises(UnsupportedModelError, match=f"weight '{PARTS[part]}': 1 of") as error:
            Model.open((model, load_demo_tokenizer()), "inspect takes")
    finally:
        tensor[index] = before
    assert f"the first at {list(index)}" in str(error.value)
    check_finite_weights(model)


@pytest.mark.parametrize("load", [Model.open, load_dense])
def test_a_folder_with_nan_is_refused_by_every_loader(folder, load):
    _change(folder, "lm_head.weight", lambda tensors: tensors["lm_head.weight"].fill_(torch.nan))
    with pytest.raises(UnsupportedModelError, match=r"weight 'lm_head.weight': 16,384 of 16,384"):
        load(folder)


def test_predictions_that_are_no_numbers_are_refused(model):
    head = model.get_parameter("lm_head.weight")
    before = head.clone()
    head.fill_(3e38)  # finite, but its products are not
    try:
        with pytest.raises(
            UnsupportedModelError, match=r"logits are NaN or infinite for \d+ of 32"
        ):
            audit((model, load_demo_tokenizer()), tokens=32, formats=["bf16"])
    finally:
        head.copy_(before)


def test_missing_tensors_are_named(folder):
    name = "model.layers.1.mlp.gate.weight"
    _change(folder, name, lambda tensors: tensors.pop(name))
    with pytest.raises(UnsupportedModelError, match=rf"lacks 1 tensor \('{name}'\)"):
        Model.open(folder)


def test_other_shapes_are_named(folder):
    weight_name = "model.layers.1.mlp.experts.3.down_proj.weight"
    _change(folder, weight_name, lambda tensors: tensors.pop(weight_name))
    message = r"'model.layers.1.mlp.experts.down_proj' has the shape \(7, 32, 32\) instead of \(8"
    with pytest.raises(UnsupportedModelError, match=message):
        Model.open(folder)


@pytest.mark.parametrize("kept", [0, 100, 2000])
def test_a_file_that_was_cut_off_is_named(folder, kept):
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UnsupportedModelError, match=f"'{file.name}' is damaged or cut off"):
        Model.open(folder)


def test_a_file_that_is_absent_is_named(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(UnsupportedModelError, match=file.name):
        Model.open(folder)


@pytest.mark.parametrize("lost", ["tokenizer*", "tokenizer.json"])
def test_a_folder_without_a_tokenizer_is_told_so(folder, lost):
    for file in folder.glob(lost):
        file.unlink()
    with pytest.raises(UnsupportedModelError, match=r"there is no tokenizer.* put tokenizer.json"):
        Model.open(folder)
    assert load_dense(folder).tokenizer is None
