"""Forcing the choice of a router, in every family."""

from contextlib import ExitStack

import pytest
import torch

from tests.models.tiny import SUPPORTED, batch, lively, tiny_model
from tieline.core.errors import UnsupportedModelError
from tieline.models import FAMILIES, capture, family_of
from tieline.models.router_output import (
    Choice,
    RouterOutput,
    override_choice,
    read_output,
    write_output,
)

PATTERNS = ["dbrx", "deepseek_v3", "gemma4", "inkling", "jetmoe", "llama4", "olmoe", "zaya"]
ALL = [
    pytest.param(name, marks=[] if name in PATTERNS else [pytest.mark.slow]) for name in SUPPORTED
]


def states(output):
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def reversed_order(output):
    return Choice(output.weights.flip(1), output.ids.flip(1))


def next_experts(output):
    return Choice(output.weights, (output.ids + 1) % output.logits.shape[-1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ALL)
def test_the_same_choice_gives_the_same_output_and_another_one_another(family):
    model = lively(tiny_model(family))
    with torch.inference_mode():
        with capture(model) as recorder:
            plain = states(model(input_ids=batch()))
        routers = [model.get_submodule(layer.name) for layer in recorder.trace().layers]
        classes = [type(router) for router in routers]
        with ExitStack() as stack:
            for router in routers:
                stack.enter_context(override_choice(router, reversed_order))
            same = states(model(input_ids=batch()))
        with override_choice(routers[0], next_experts):
            other = states(model(input_ids=batch()))
    assert torch.allclose(same, plain, atol=1e-5)
    assert not torch.allclose(other, plain, atol=1e-5)
    assert [type(router) for router in routers] == classes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", PATTERNS)
def test_what_is_written_is_read_again(family):
    """Write a choice that differs everywhere, read it, and find nothing else changed."""
    model, calls = lively(tiny_model(family)), []
    with torch.inference_mode(), capture(model) as recorder:
        model(input_ids=batch())
    router = model.get_submodule(recorder.trace().layers[0].name)
    facts, plain = family_of(router), type(router)

    class Watched(plain):
        pass

    def watched(self, *args, **kwargs):
        output = getattr(plain, facts.method)(self, *args, **kwargs)
        calls.append((args, output))
        return output

    setattr(Watched, facts.method, watched)
    router.__class__ = Watched
    with torch.inference_mode():
        model(input_ids=batch())
    router.__class__ = plain
    args, output = calls[0]
    router_output = read_output(facts, router, (args, {}), output)
    # expert 1 or 2 first, so that no skip class is named; weights are distinct numbers
    first = 1 + torch.arange(len(router_output.ids)) % 2
    ids = (first[:, None] + 2 * torch.arange(router_output.ids.shape[1])).to(router_output.ids)
    weights = torch.linspace(0.25, 0.75, ids.numel()).view(ids.shape).flip(1)
    written = write_output(facts, output, router_output, Choice(weights, ids))
    again = read_output(facts, router, (args, {}), written)
    order = again.ids.sort(dim=1).indices  # a dense output is read in order of weight
    assert torch.equal(again.ids.gather(1, order), ids)
    assert torch.allclose(again.weights.gather(1, order), weights.to(again.weights))
    assert torch.equal(again.logits, router_output.logits)
    assert len(written) == len(output)


def test_the_skip_class_is_written_as_expert_0_without_weight():
    facts = FAMILIES["ZayaRouter"]
    router_output = RouterOutput(
        torch.zeros(2, 5), torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    )
    choice = Choice(torch.tensor([[0.5], [0.25]]), torch.tensor([[4], [3]]))
    written = write_output(
        facts,
        (router_output.logits, router_output.weights, router_output.ids, "states"),
        router_output,
        choice,
    )
    assert written[1].tolist() == [[0.0], [0.25]]
    assert written[2].tolist() == [[0], [3]]
    assert written[3] == "states"


def test_the_class_comes_back_after_an_error():
    model = tiny_model("olmoe")
    router = model.model.layers[0].mlp.gate
    before = type(router)

    def wrong(output):
        raise KeyError

    with pytest.raises(KeyError), override_choice(router, wrong):
        model(input_ids=batch())
    assert type(router) is before


@pytest.mark.parametrize("family", [None, "switch_transformers"])
def test_modules_without_a_known_choice_are_refused(family):
    module = torch.nn.Linear(2, 2)
    if family is not None:
        model = tiny_model(family)
        module = next(m for m in model.modules() if family_of(m) is not None)
    forced = override_choice(module, reversed_order)
    with pytest.raises(UnsupportedModelError, match="no router whose choice is known"):
        forced.__enter__()


def test_a_capture_below_an_override_sees_the_routers_own_choice():
    model, ids = lively(tiny_model("olmoe")), batch()
    router = model.model.layers[1].mlp.gate
    with torch.inference_mode():
        with capture(model) as recorder:
            model(input_ids=ids)
        with capture(model) as below, override_choice(router, next_experts):
            model(input_ids=ids)
    plain, captured = recorder.trace().layers[1], below.trace().layers[1]
    assert torch.equal(plain.experts, captured.experts)
