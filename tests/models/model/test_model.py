"""Loading models, and refusing what is no model, no Mixture of Experts, or no safetensors."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.tiny import batch, tiny_model
from tieline.core.errors import TielineError
from tieline.models import model as opening
from tieline.models.demo import load_demo_tokenizer
from tieline.models.model import Model, read_shape


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("olmoe")
    tiny_model("olmoe").save_pretrained(folder)
    load_demo_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_folder_is_loaded_as_it_was_saved(checkpoint):
    loaded = Model.open(checkpoint)
    assert loaded.name == str(checkpoint)
    assert not loaded.module.training
    assert loaded.tokenizer("a b")["input_ids"] == load_demo_tokenizer()("a b")["input_ids"]
    plain = tiny_model("olmoe")
    logits = loaded.module(input_ids=batch().cpu()).logits
    assert torch.equal(logits, plain.cpu()(input_ids=batch().cpu()).logits)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_the_precision_is_the_one_asked_for(checkpoint, dtype, expected):
    assert {p.dtype for p in Model.open(str(checkpoint), dtype=dtype).module.parameters()} == {
        expected
    }


def test_nothing_named_is_the_demo_model():
    loaded = Model.open(dtype="bf16")
    assert (loaded.name, loaded.module.dtype) == ("demo", torch.bfloat16)
    assert Model.open().module.dtype == torch.float32


def test_demo_is_the_model_in_the_box_unless_a_checkpoint_is_called_so(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()  # a folder of something else
    assert Model.open("demo").name == "demo"
    assert read_shape("demo").n_experts == 16
    (Path("demo") / "config.json").write_text("{")
    with pytest.raises(TielineError, match=r"demo/config\.json: not valid JSON"):
        Model.open("demo")


def test_a_missing_demo_model_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(opening, "DEMO_FOLDER", tmp_path)
    with pytest.raises(TielineError, match="demo model is missing"):
        Model.open()


def test_a_model_without_experts_is_refused_before_its_weights_are_read(tmp_path):
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)  # there are no weights to read
    with pytest.raises(TielineError, match="LlamaForCausalLM is not a Mixture-of-Experts model"):
        Model.open(tmp_path)


def test_a_family_that_cannot_be_captured_is_refused_before_its_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "switch_transformers"}')
    with pytest.raises(TielineError, match="cannot be captured"):
        Model.open(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{not json", "configuration"),
        ('{"model_type": "whatever"}', "configuration"),
        ('{"architectures": ["X"]}', "configuration"),
        ('{"model_type": "olmoe", "num_experts": "many"}', "configuration|built"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(tmp_path, config, message):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(TielineError, match=message):
        Model.open(tmp_path)


def test_pickled_weights_are_never_loaded(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save(tiny_model("olmoe").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(TielineError, match="pickled weights are never loaded"):
        Model.open(tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "foreign"])
def test_damaged_weights_are_refused(checkpoint, tmp_path, damage):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:1000])
        expected = "cannot load the weights"
    else:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        small = LlamaConfig(vocab_size=8, num_hidden_layers=1, num_key_value_heads=2, **sizes)
        LlamaForCausalLM(small).save_pretrained(tmp_path / "other")
        weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
        expected = "does not fit its configuration"
    with pytest.raises(TielineError, match=expected):
        Model.open(tmp_path)


def test_missing_tensors_are_not_replaced_by_random_numbers(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TielineError, match="lacks 1 tensor "):
        Model.open(tmp_path)


def test_a_missing_tokenizer_is_told(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "olmoe"}))
    with pytest.raises(TielineError, match=r"tokenizer|weights"):
        Model.open(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "/no/such/folder"}, "no such folder"),
        ({"source": "./model"}, "no such folder"),
        ({"source": "a/b/c"}, "no such folder"),
        ({"source": ""}, "no such folder|no config.json"),
        ({"source": "nobody/nothing"}, "'nobody/nothing' is no local folder, and the hub"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"device": "warp:9"}, "device 'warp:9' cannot be used"),
    ],
)
def test_bad_names_are_refused(arguments, message):
    with pytest.raises(TielineError, match=message):
        Model.open(**arguments)


def test_a_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(TielineError, match=r"no config\.json in the folder"):
        Model.open(tmp_path)
