"""When router inputs are kept, and which matrices belong to the routers."""

import pytest
import torch

from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis import inspect as weights
from tieline.analysis.inspect import router_inputs_fit
from tieline.models import capture, find_routers
from tieline.models.linear_routers import linear_weights


def traced(model, keep="inputs"):
    with torch.inference_mode(), capture(model, keep=keep) as recorder:
        model(input_ids=batch())
    return recorder.trace()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_matrices_that_make_the_logits_are_found(family):
    model = lively(tiny_model(family))
    matrices = linear_weights(model, traced(model))
    assert set(matrices) == set(find_routers(model))
    for name, matrix in matrices.items():
        assert torch.equal(matrix.cpu(), model.get_submodule(name).weight.cpu())


def test_matrices_that_do_not_make_the_logits_are_left_out():
    model = lively(tiny_model("olmoe"))
    trace = traced(model)
    model.get_submodule(trace.layers[0].name).weight.add_(1)
    assert list(linear_weights(model, trace)) == [trace.layers[1].name]


def test_without_inputs_or_matrix_there_is_nothing():
    model = lively(tiny_model("olmoe"))
    assert linear_weights(model, traced(model, "scores")) == {}
    gemma = lively(tiny_model("gemma4"))
    assert linear_weights(gemma, traced(gemma)) == {}


def test_inputs_are_kept_while_they_are_small(monkeypatch):
    model = tiny_model("olmoe")
    names = list(find_routers(model))
    assert router_inputs_fit(model, names, 1024)
    monkeypatch.setattr(weights, "MOST_BYTES", 2 * 4 * 32 * 10)
    assert router_inputs_fit(model, names, 10)
    assert not router_inputs_fit(model, names, 11)
    dbrx = tiny_model("dbrx")
    assert not router_inputs_fit(dbrx, list(find_routers(dbrx)), 1)
