"""A smoothed model for those who have no Tieline: what the folder holds, and who loads it."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.tiny import SUPPORTED, batch, lively, tiny_model
from tieline.core.errors import UnsupportedModelError
from tieline.models import load_pretrained
from tieline.models.demo import load_demo_model
from tieline.models.smoothed_model import portable_rules, smooth_
from tieline.serving.modeling_tieline import MARKER, smooth_model

pytestmark = pytest.mark.filterwarnings("ignore")

NOT_PORTABLE = {
    "dbrx": "routes in the block",
    "deepseek_v4": "activation",
    "diffusion_gemma": "probabilities",
    "ernie4_5_moe": "smallest sum",
    "ernie4_5_vl_moe": "smallest sum",
    "gemma4": "probabilities",
    "inkling": "shared weights",
    "jetmoe": "sorted slots",
    "llama4": "dense weights",
    "longcat_flash": "identity experts",
}
SMOOTHED = sorted(set(SUPPORTED) - {"phimoe", "zaya"})
PORTABLE = sorted(set(SMOOTHED) - set(NOT_PORTABLE))
SHOWN = {"mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "lfm2_moe"}


def logits(model, ids):
    with torch.inference_mode():
        output = model(input_ids=ids)
    return getattr(output, "logits", output[0])


@pytest.mark.parametrize("gate", ["projected", "ramp"])
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in SHOWN else pytest.mark.slow) for name in PORTABLE],
)
def test_the_modelling_file_gives_the_bits_of_every_family(family, gate):
    model, other = lively(tiny_model(family)), lively(tiny_model(family))
    smooth_(model, 0.1, gate=gate)
    smooth_model(other, {"rules": json.loads(json.dumps(portable_rules(model)))})
    expected = logits(model, batch())
    assert torch.equal(logits(other, batch()), expected)
    assert not torch.equal(logits(lively(tiny_model(family)), batch()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(NOT_PORTABLE))
def test_a_rule_that_the_file_does_not_know_is_not_stated(family):
    model = lively(tiny_model(family))
    smooth_(model, 0.1)
    assert portable_rules(model) is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A smoothed demo model and the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("smoothed")
    model = load_demo_model()
    smooth_(model, 0.2)
    model.save_pretrained(folder)
    return model, folder


IDS = torch.randint(3, 500, (64, 12), generator=torch.Generator().manual_seed(5))
WITHOUT_TIELINE = """
import sys
sys.modules["tieline"] = None  # an import of it raises
import torch
from transformers import AutoModelForCausalLM
folder, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
ids = torch.randint(3, 500, (64, 12), generator=torch.Generator().manual_seed(5))
with torch.inference_mode():
    tokens = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    torch.save((tokens, model(input_ids=ids).logits), target)
try:
    model.save_pretrained(target + "-again")
except ValueError as problem:
    assert "load_pretrained" in str(problem)
else:
    raise AssertionError("saved without its rules")
"""


def test_it_loads_by_trust_remote_code_without_tieline_to_the_bit(saved, tmp_path):
    model, folder = saved
    target = tmp_path / "answers.pt"
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", WITHOUT_TIELINE, str(folder), str(target)]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, capture_output=True)
    tokens, scores = torch.load(target)
    with torch.inference_mode():
        expected = model.generate(IDS, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, expected)
    assert torch.equal(scores, logits(model, IDS))


def test_the_automatic_class_loads_it_once_tieline_is_imported(saved):
    model, folder = saved
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    assert portable_rules(again) == portable_rules(model)


def test_the_folder_has_a_model_card_and_the_rules(saved):
    _, folder = saved
    fields = json.loads((folder / "config.json").read_text())
    assert fields["model_type"] == "tieline"
    assert [rule["epsilon"] for rule in fields["tieline"]["rules"]] == [0.2] * 4
    assert "olmoe" in (folder / "README.md").read_text()
    assert "import tieline" not in (folder / "modeling_tieline.py").read_text()


@pytest.mark.parametrize("name", ["model.safetensors", "model.tieline.safetensors"])
def test_a_configuration_that_lost_the_record_is_refused(saved, tmp_path, name):
    _, folder = saved
    stripped = tmp_path / "stripped"
    shutil.copytree(folder, stripped)
    fields = json.loads((folder / "config.json").read_text())
    (stripped / "config.json").write_text(json.dumps(fields["tieline"]["config"]))
    (stripped / "model.tieline.safetensors").rename(stripped / name)
    with pytest.raises(UnsupportedModelError, match=MARKER):
        load_pretrained(stripped)


def test_a_change_of_another_kind_keeps_the_form_that_tieline_loads(tmp_path):
    model = tiny_model("jetmoe")
    smooth_(model, 0.1)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert "load it with tieline" in fields["model_type"]
    assert not (tmp_path / "modeling_tieline.py").exists()
    assert torch.equal(logits(load_pretrained(tmp_path), batch()), logits(model, batch()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_smoothed_model_can_be_copied_and_pickled(saved, copied, tmp_path):
    model, _ = saved
    again = copied(model)
    assert type(again) is type(model)
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    again.save_pretrained(tmp_path)
    assert torch.equal(logits(load_pretrained(tmp_path), IDS), logits(model, IDS))
