"""Changes recorded in the configuration: saved, restored, and read in their older forms."""

import json
from pathlib import Path

import pytest
import torch

from tests.models.dense import dense_model
from tieline.core.errors import UnsupportedModelError
from tieline.models import find_routers, load_pretrained, load_smoothed
from tieline.models.saved_models import changes_of, forget_change, record_change, refuse_quantised
from tieline.models.smoothed_router import router_smoothing

pytestmark = pytest.mark.filterwarnings("ignore")
FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_changes_come_and_go_in_order():
    model = dense_model("llama")
    config, plain, classes = model.config, model.config.to_dict(), (type(model), type(model.config))
    record_change(model, "one", {"a": 1})
    record_change(model, "another", {})
    assert list(changes_of(config).items()) == [("one", {"a": 1}), ("another", {})]
    saved = json.loads(config.to_json_string())["tieline"]
    assert list(saved["changes"]) == ["one", "another"]
    record_change(model, "one", {"a": 2})
    forget_change(model, "another")
    assert changes_of(config) == {"one": {"a": 2}}
    forget_change(model, "one")
    assert config.to_dict() == plain
    forget_change(model, "one")
    assert (type(model), type(config)) == classes


def test_a_quantised_model_is_refused():
    model = dense_model("llama")
    refuse_quantised(model, "one")
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UnsupportedModelError, match="quantised"):
        refuse_quantised(model, "one")


@pytest.mark.parametrize(
    ("name", "features", "logits"),
    [
        ("v1-smoothed", ["smooth"], [-1.2953278, -3.2407339, -1.1026907, -0.2213543]),
        (
            "v1-rerouted-smoothed",
            ["reroute", "smooth"],
            [-3.6407592, -2.8054492, -2.8550458, 1.4068575],
        ),
        ("v1-upcycled", ["upcycle"], [-0.2227312, 0.2844511, -1.0843180, -1.7196885]),
    ],
)
def test_models_saved_in_the_first_forms_still_load(name, features, logits, tmp_path):
    """Folders that earlier code wrote, and the logits that it had before it wrote them."""
    model = load_pretrained(FIXTURES / name).eval()
    ids = torch.arange(3, 11).view(1, 8)
    with torch.inference_mode():
        found = model(input_ids=ids).logits
    torch.testing.assert_close(found[0, -1, :4], torch.tensor(logits), rtol=1e-4, atol=1e-5)
    assert list(changes_of(model.config)) == features
    assert not hasattr(model.config, "quantization_config")
    if "smooth" in features:
        smoothed = next(iter(find_routers(load_smoothed(FIXTURES / name)).values()))
        assert router_smoothing(smoothed).k_max == 4
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.tieline.safetensors").is_file()
    with torch.inference_mode():
        again = load_pretrained(tmp_path).eval()(input_ids=ids).logits
    assert torch.equal(again, found)


def test_unchanged_models_load_as_ever(tmp_path):
    model = dense_model("llama")
    model.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    assert type(again) is type(model)
    assert changes_of(again.config) == {}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"later": {}}, "later"), ({"upcycle": 3}, "no table"), ([], "no table")],
)
def test_unknown_and_malformed_changes_are_refused(changes, message, old, tmp_path):
    dense_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    new = {"model_type": "x", "tieline": {"changes": changes, "config": config}}
    told = config | {"quantization_config": {"tieline": changes}} if old else new
    path.write_text(json.dumps(told))
    with pytest.raises(UnsupportedModelError, match=message):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("names", [None, [], ["os"], ["LlamaConfig"], ["Nothing"]])
def test_a_class_that_is_no_model_is_not_built(names, tmp_path):
    dense_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"architectures": names}))
    with pytest.raises(UnsupportedModelError, match="names no model"):
        load_pretrained(tmp_path)
