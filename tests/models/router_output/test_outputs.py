"""Logits, weights and ids out of every layout of a router's output."""

import pytest
import torch
from torch import nn

from tests.models.tiny import batch, lively, tiny_model
from tieline.core.errors import UnsupportedModelError
from tieline.models import FAMILIES, RouterFamily, capture
from tieline.models.router_output import read_output
from tieline.models.router_output_layouts import DenseLayout, SortedLayout, TupleLayout


class _Router(nn.Module):
    top_k = 2


def _read(output, args=(), **facts):
    return read_output(RouterFamily("own", ("_Router",), **facts), _Router(), (args, {}), output)


LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 4.0, 7.0, 6.0]])
IDS = torch.tensor([[1, 3], [2, 3]])
WEIGHTS = LOGITS.gather(1, IDS).sigmoid()


def _same(router_output, weights=WEIGHTS, ids=IDS):
    assert torch.equal(router_output.logits, LOGITS)
    assert torch.equal(router_output.weights, weights)
    assert torch.equal(router_output.ids, ids)


def test_the_usual_layout_may_carry_further_outputs_and_batch_axes():
    _same(_read((LOGITS, WEIGHTS, IDS, "more")))
    _same(_read((LOGITS[None], WEIGHTS[None], IDS[None])))


def test_dense_weights_are_zero_where_an_expert_is_not_chosen():
    dense = torch.zeros_like(LOGITS).scatter(1, IDS, WEIGHTS)
    _same(_read((dense, LOGITS), layout=DenseLayout()))


def test_slots_sorted_by_expert_are_put_back_to_their_tokens():
    slots = IDS.flatten().sort(stable=True).indices
    sizes = torch.bincount(IDS.flatten(), minlength=4).tolist()
    _same(
        _read((slots, slots // 2, WEIGHTS.flatten()[slots], sizes, LOGITS), layout=SortedLayout())
    )


def test_a_method_is_given_the_logits_and_returns_the_rest():
    _same(_read((WEIGHTS, IDS), args=(LOGITS,), layout=TupleLayout(None, 0, 1)))


def test_the_skip_class_is_the_last_one_whatever_index_it_is_returned_as():
    weights = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
    router_output = _read((LOGITS, weights, torch.tensor([[1, 0], [0, 2]])), skip_class=True)
    assert router_output.ids.tolist() == [[1, 3], [3, 2]]


@pytest.mark.parametrize(
    "output",
    [LOGITS, (LOGITS, WEIGHTS), (LOGITS, WEIGHTS, IDS[:, :1]), (LOGITS[0], WEIGHTS, IDS), None],
)
def test_an_output_of_another_form_is_refused_by_family(output):
    with pytest.raises(UnsupportedModelError, match="'own'"):
        _read(output)


@pytest.mark.parametrize("ids", [IDS + 1, IDS - 2, IDS.float()])
def test_ids_that_are_no_experts_are_refused(ids):
    with pytest.raises(UnsupportedModelError, match=r"outside 0\.\.3"):
        _read((LOGITS, WEIGHTS, ids))


@pytest.mark.parametrize(("family", "router"), [("llama4", "Llama4Router"), ("dbrx", "DbrxFFN")])
def test_families_with_a_layout_of_their_own_give_their_experts_what_was_captured(family, router):
    model = lively(tiny_model(family))
    calls = []
    for module in model.modules():
        if type(module).__name__ in ("DbrxExperts", "Llama4TextExperts"):
            module.register_forward_pre_hook(lambda _, args: calls.append(args))
    with torch.no_grad(), capture(model) as recorder:
        model(input_ids=batch())
    assert FAMILIES[router].name == family
    for layer, args in zip(recorder.trace().layers, calls, strict=True):
        none = torch.zeros(24, 8, device="cpu")
        weights = none.scatter(1, layer.experts[:, :2].long(), layer.weights).to(args[0].device)
        if family == "dbrx":
            assert torch.equal(weights, torch.zeros(24, 8).scatter(1, args[1], args[2]))
        else:  # each expert sees the tokens, scaled by their weights
            used = args[0].view(8, 24, -1).abs().sum(dim=-1).T > 0
            assert torch.equal(weights > 0, used)


def test_jetmoe_weights_sum_to_one_over_the_chosen():
    model = lively(tiny_model("jetmoe"))
    with torch.no_grad(), capture(model) as recorder:
        model(input_ids=batch())
    for layer in recorder.trace().layers:
        assert layer.scores is not None
        torch.testing.assert_close(layer.weights, layer.scores[:, :2].softmax(dim=-1))
