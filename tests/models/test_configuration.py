"""Sizes that no model has are refused by name, and those of real models are not."""

import json

import pytest

from tests.models.tiny import tiny_model
from tieline.core.errors import UnsupportedModelError
from tieline.core.untrusted_input import check_config_sizes
from tieline.models.model import Model, read_shape
from tieline.models.saved_models import read_checkpoint

MIXTRAL = {"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000: need at most 10,000"),
        ({"num_local_experts": 10**9}, "num_local_experts=1000000000: need at most"),
        ({"num_experts_per_tok": -3}, "num_experts_per_tok=-3: need 1 <= num_experts_per_tok <= "),
        ({"num_experts_per_tok": 99}, r"num_experts_per_tok=99: need .* <= num_local_experts=8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"hidden_size": 10**30}, r"hidden_size=10{30}: need at most"),
        ({"n_group": 4, "topk_group": 5}, "topk_group=5: need 1 <= topk_group <= n_group=4"),
        ({"text_config": {"num_layers": 10**6}}, "num_layers=1000000"),
        ({"tieline": {"config": {"n_layer": 10**6}}}, "n_layer=1000000"),
    ],
)
def test_what_no_model_has_is_refused(changed, message):
    with pytest.raises(UnsupportedModelError, match=message):
        check_config_sizes(MIXTRAL | changed)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_local_experts": 0, "num_experts_per_tok": 0},  # a dense model of a family of mixtures
        {"num_experts_per_tok": [2, 2]},
        {"n_group": None, "topk_group": 0},
        {"max_position_embeddings": 10**7, "eos_token_id": -1, "flag": True},
    ],
)
def test_what_models_have_is_accepted(changed):
    check_config_sizes(MIXTRAL | changed)


def test_every_loader_refuses_before_it_builds(tmp_path):
    tiny_model("mixtral").config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 10**9}))
    for load in (read_checkpoint, Model.open, read_shape):
        with pytest.raises(UnsupportedModelError, match="num_hidden_layers=1000000000"):
            load(tmp_path)
