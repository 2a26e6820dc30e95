"""Marks in the configuration, and what loading does with those it does not know."""

import json

import pytest

from tests.hf.dense import dense_model
from tieline.core.errors import UnsupportedModelError
from tieline.hf.marks import load_pretrained, mark, marks_of, unmark

pytestmark = pytest.mark.filterwarnings("ignore")


def test_marks_come_and_go_in_order():
    config = dense_model("llama").config
    plain = config.to_dict()
    mark(config, "one", {"a": 1})
    mark(config, "two", {})
    assert list(marks_of(config).items()) == [("one", {"a": 1}), ("two", {})]
    mark(config, "one", {"a": 2})
    unmark(config, "two")
    assert marks_of(config) == {"one": {"a": 2}}
    unmark(config, "one")
    assert config.to_dict() == plain
    unmark(config, "one")


def test_a_quantised_model_is_not_marked():
    config = dense_model("llama").config
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UnsupportedModelError, match="quantised"):
        mark(config, "one", {})


def test_unmarked_models_load_as_ever(tmp_path):
    model = dense_model("llama")
    model.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    assert type(again) is type(model)
    assert marks_of(again.config) == {}


@pytest.mark.parametrize(
    ("marks", "message"), [({"later": {}}, "later"), ({"upcycle": 3}, "no table")]
)
def test_unknown_and_malformed_marks_are_refused(marks, message, tmp_path):
    dense_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"tieline": marks}}))
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
