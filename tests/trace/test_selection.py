"""Cutting and joining traces."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.zoo import FACTS, make_trace, recipes
from tieline.core.errors import TraceError
from tieline.trace import concatenate, select_documents, select_layers, select_tokens
from tieline.trace.record import LazyLayers, identical_values

TRACE = make_trace()


def lazy(trace):
    return dataclasses.replace(
        trace, layers=LazyLayers(len(trace.layers), lambda index: trace.layers[index])
    )


@given(recipes, st.integers(0, 24))
def test_cut_pieces_join_to_the_whole(recipe, cut):
    trace = make_trace(**{**recipe, "repeats": False})
    pieces = [select_tokens(trace, slice(cut)), select_tokens(trace, slice(cut, None))]
    assert identical_values(concatenate(pieces), trace)
    assert identical_values(concatenate([lazy(piece) for piece in pieces]), trace)


def test_one_trace_is_joined_without_a_copy():
    assert concatenate([TRACE]).layers[0].experts is TRACE.layers[0].experts


def test_an_index_takes_tokens_in_its_order():
    index = torch.tensor([7, 0, 7])
    selection = select_tokens(TRACE, index)
    assert selection.tokens.tolist() == TRACE.tokens[index].tolist()
    for layer, full_layer in zip(selection.layers, TRACE.layers, strict=True):
        assert torch.equal(layer.scores, full_layer.scores[index])
        assert layer.facts == full_layer.facts
    assert torch.equal(selection.layers[1].bias, TRACE.layers[1].bias)
    assert identical_values(select_tokens(lazy(TRACE), index), selection)


def test_a_mask_keeps_the_order_of_the_trace():
    mask = torch.arange(20) % 3 == 0
    assert identical_values(select_tokens(TRACE, mask), select_tokens(TRACE, mask.nonzero()[:, 0]))


@pytest.mark.parametrize(
    "index", [torch.tensor([20]), torch.tensor([-1]), torch.ones(19, dtype=torch.bool)]
)
def test_indices_outside_the_trace_are_refused(index):
    with pytest.raises(TraceError, match=r"0 ... 19 or a mask of 20"):
        select_tokens(TRACE, index)


def test_documents_are_selected_whole():
    selection = select_documents(TRACE, [0, 2])
    assert set(selection.documents.tolist()) == {0, 2}
    assert selection.n_tokens == int(((TRACE.documents == 0) | (TRACE.documents == 2)).sum())
    with pytest.raises(TraceError, match=r"no tokens of documents \[99\]"):
        select_documents(TRACE, [0, 99])


def test_layers_are_selected_by_place_or_name():
    for trace in (TRACE, lazy(TRACE)):
        selection = select_layers(trace, ["layers.2", -4, 1])
        assert [layer.name for layer in selection.layers] == ["layers.2", "layers.0", "layers.1"]
    for wrong in (4, -5, "layers.9"):
        with pytest.raises(TraceError, match="no layer"):
            select_layers(TRACE, [wrong])
    with pytest.raises(TraceError, match="at least one layer"):
        select_layers(TRACE, [])


def test_tokens_that_come_twice_are_refused_or_renumbered():
    with pytest.raises(TraceError, match="need renumber"):
        concatenate([TRACE, TRACE])
    both = concatenate([TRACE, TRACE], documents="renumber")
    low, high = int(TRACE.documents.min()), int(TRACE.documents.max())
    assert torch.equal(both.documents[:20], TRACE.documents - low)
    assert torch.equal(both.documents[20:], TRACE.documents - 2 * low + high + 1)
    empty = select_tokens(TRACE, slice(0))
    assert concatenate([empty, TRACE, empty], documents="renumber").n_tokens == 20


def test_provenance_is_the_common_one_or_all_of_them():
    other = dataclasses.replace(make_trace(2), provenance={"model": "b"})
    same = concatenate([TRACE, make_trace(2)], documents="renumber")
    assert same.provenance == TRACE.provenance
    both = concatenate([TRACE, other], documents="renumber")
    assert both.provenance == {"parts": [TRACE.provenance, {"model": "b"}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other"}, "agree in name"),
        ({"facts": dataclasses.replace(FACTS[1], units="logits")}, "layer 1: facts"),
        ({"bias": None}, "layer 1: bias"),
        ({"bias": torch.ones(6)}, "layer 1: bias"),
        ({"weights": None}, "layer 1: recorded"),
        ({"scores": TRACE.layers[1].scores.double()}, "layer 1: recorded"),
        ({"inputs": torch.zeros(20, 4)}, "layer 1: recorded"),
    ],
)
def test_traces_of_different_routers_are_refused(change, message):
    layers = list(TRACE.layers)
    layers[1] = dataclasses.replace(layers[1], **change)
    other = dataclasses.replace(TRACE, layers=tuple(layers))
    with pytest.raises(TraceError, match=message):
        concatenate([TRACE, other], documents="renumber")


def test_grids_and_numbers_of_layers_must_agree():
    other = dataclasses.replace(TRACE, epsilons=(1.0, 2.0, 3.0))
    with pytest.raises(TraceError, match="agree in epsilons"):
        concatenate([TRACE, other], documents="renumber")
    with pytest.raises(TraceError, match="agree in number of layers"):
        concatenate([TRACE, select_layers(TRACE, [0])], documents="renumber")
    with pytest.raises(TraceError, match="got no traces"):
        concatenate([])


def test_lazy_layers_are_made_once_while_they_are_in_use():
    loads = []
    layers = LazyLayers(4, lambda index: loads.append(index) or TRACE.layers[index])
    assert layers[1] is layers[1]
    assert layers[-1] is TRACE.layers[3]
    assert [layer.name for layer in layers[1:3]] == ["layers.1", "layers.2"]
    assert loads == [1, 3, 1, 2]
    with pytest.raises(IndexError):
        layers[4]
