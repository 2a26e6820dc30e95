"""The swapped choice equals what the router itself chooses beyond the wall."""

import pytest
import torch

from tests.analysis.walls import walls
from tests.models.tiny import SUPPORTED, lively, tiny_model
from tieline.analysis.jumps import recorded_choice, relative_change, swapped_choice
from tieline.core.errors import TraceError
from tieline.trace import LayerFacts, LayerTrace

ON_DECODER_LAYER = {"gemma4", "diffusion_gemma"}  # no block calls the router: see test_blocks
PATTERNS = [
    "cohere2_moe",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "ernie4_5_vl_moe",
    "jetmoe",
    "kolibri1",
    "lfm2_moe",
    "llama4",
    "longcat_flash",
    "olmoe",
    "phimoe",
    "zaya",
]
FAMILIES = [
    pytest.param(name, marks=[] if name in PATTERNS else [pytest.mark.slow])
    for name in SUPPORTED
    if name not in ON_DECODER_LAYER
]
ROUNDING = {"inkling": 0.1}  # shared experts, normalised with the chosen ones, keep their weights


def model_of(family):
    model = lively(tiny_model(family))
    if family == "zaya":  # one expert per token: a large bias would choose it for all
        for name, tensor in model.named_buffers():
            if name.endswith("balancing_biases"):
                tensor.mul_(0.02)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_swapped_output_is_that_beyond_the_wall(family):
    model = model_of(family)
    with torch.inference_mode():
        walker, crossings = walls(model)
        assert crossings, "no wall between the tokens"
        for wall in crossings:
            token = torch.tensor([0])
            plain = walker.block.run(wall.rows, recorded_choice(wall.layer, token))
            router = model.get_submodule(walker.name)
            swapped = walker.block.run(wall.rows, swapped_choice(wall.layer, token, router))
            tolerance = ROUNDING.get(family, 1e-4)
            assert relative_change(wall.before, plain.reshape(1, -1)) < 1e-5
            assert relative_change(wall.after, swapped.reshape(1, -1)) < tolerance
            assert relative_change(wall.before, wall.after) > 1e-3, "a wall without a jump"


def layer(bias=None, units="logits", scores=((2.0, 1.0, 0.5),)):
    return LayerTrace(
        name="router",
        facts=LayerFacts(4, 2, units),
        experts=torch.tensor([[3, 1, 0]]),
        scores=torch.tensor(scores),
        weights=torch.tensor([[0.75, 0.25]]),
        bias=None if bias is None else torch.tensor(bias),
    )


class OlmoeTopKRouter(torch.nn.Module):
    norm_topk_prob = True


class FlintTopKRouter(torch.nn.Module):
    def __init__(self, renormalise):
        super().__init__()
        self.norm_topk_prob = renormalise


def test_without_a_bias_the_entering_expert_takes_the_weight():
    choice = swapped_choice(layer(), torch.tensor([0, 0]), OlmoeTopKRouter())
    assert choice.ids.tolist() == [[3, 0], [3, 0]]
    assert torch.equal(choice.weights, torch.tensor([[0.75, 0.25]] * 2))


@pytest.mark.parametrize(("renormalise", "weights"), [(False, [0.75, 0.5]), (True, [0.6, 0.4])])
def test_with_a_bias_weights_follow_the_scores_without_it(renormalise, weights):
    # at the tie both selection scores are 0.75: expert 1 has s = 0.25, expert 0 has s = 0.5
    some = layer(bias=(0.25, 0.5, 0.0, 0.0), units="sigmoid", scores=((1.0, 0.75, 0.5),))
    choice = swapped_choice(some, torch.tensor([0]), FlintTopKRouter(renormalise))
    assert choice.ids.tolist() == [[3, 0]]
    assert choice.weights[0].tolist() == pytest.approx(weights)


class Gemma4TextRouter(torch.nn.Module):
    per_expert_scale = torch.tensor([3.0, 2.0, 1.0, 1.0])


def test_a_factor_of_an_expert_goes_with_it():
    choice = swapped_choice(layer(), torch.tensor([0]), Gemma4TextRouter())
    assert choice.weights.tolist() == [[0.75, 0.375]]


class ZayaRouter(torch.nn.Module):
    pass


def test_an_expert_that_enters_for_none_gets_the_weight_of_its_score():
    skips = LayerTrace(
        name="router",
        facts=LayerFacts(4, 1, "softmax"),
        experts=torch.tensor([[3, 1]]),
        scores=torch.tensor([[0.5, 0.25]]),
        weights=torch.tensor([[0.0]]),
        bias=torch.tensor([0.0, 0.125, 0.0, 0.25]),
    )
    choice = swapped_choice(skips, torch.tensor([0]), ZayaRouter())
    assert (choice.ids.tolist(), choice.weights.tolist()) == ([[1]], [[0.375]])


def test_the_trace_is_left_as_it_is():
    some = layer()
    swapped_choice(some, torch.tensor([0]), OlmoeTopKRouter())
    assert some.experts.tolist() == [[3, 1, 0]]
    assert some.weights.tolist() == [[0.75, 0.25]]


def test_a_trace_without_weights_is_refused():
    bare = LayerTrace("router", LayerFacts(4, 2), torch.tensor([[3, 1, 0]]))
    with pytest.raises(TraceError, match="no combine weights"):
        recorded_choice(bare, torch.tensor([0]))
