"""Changes recorded in the configuration: saved and restored."""

import json

import pytest

from tests.models.dense import dense_model
from tieline.core.errors import UnsupportedModelError
from tieline.models import load_pretrained
from tieline.models.saved_models import changes_of, forget_change, record_change, refuse_quantised

pytestmark = pytest.mark.filterwarnings("ignore")


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


def test_unchanged_models_load_as_ever(tmp_path):
    model = dense_model("llama")
    model.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    assert type(again) is type(model)
    assert changes_of(again.config) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"later": {}}, "later"), ({"upcycle": 3}, "no table"), ([], "no table")],
)
def test_unknown_and_malformed_changes_are_refused(changes, message, tmp_path):
    dense_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    settings = {"model_type": "x", "tieline": {"changes": changes, "config": config}}
    path.write_text(json.dumps(settings))
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
