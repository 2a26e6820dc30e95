"""Finding the block of a router and running some of its tokens again."""

import pytest
import torch

from tests.analysis.walls import watched
from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.jumps import recorded_choice
from tieline.models.routed_block import BlockCall, block_of
from tieline.models.router_output import Choice, override_choice


@pytest.mark.parametrize(
    ("family", "router", "block"),
    [
        ("olmoe", "model.layers.1.mlp.gate", "model.layers.1.mlp"),
        ("dbrx", "transformer.blocks.0.ffn", "transformer.blocks.0.ffn"),
        ("gemma4", "model.layers.0.router", "model.layers.0.experts"),
    ],
)
def test_the_block_is_what_calls_the_router_or_the_experts_on_a_decoder_layer(
    family, router, block
):
    assert block_of(tiny_model(family), router).name == block


def test_a_router_at_the_root_of_a_model_has_the_model_for_a_block():
    inner = tiny_model("olmoe").model.layers[0].mlp
    assert block_of(inner, "gate").module is inner


@pytest.mark.filterwarnings("ignore")
def test_experts_on_a_decoder_layer_make_what_they_make_inside_of_it():
    """Swap the choice of one token inside gemma4; the experts alone must give the same."""
    model = lively(tiny_model("gemma4"))
    trace, sampler = watched(model, [batch()])
    layer, sample = trace.layers[0], sampler.near(trace.layers[0].name)
    block, outputs = sampler.block(layer.name), []
    token = int(sample.tokens[0])
    swap = recorded_choice(layer, sample.tokens)
    swap = Choice(swap.weights.flip(1), layer.experts[sample.tokens, 1:3].long())
    handle = block.module.register_forward_hook(lambda m, args, output: outputs.append(output))

    def rule(choice):
        weights, ids = choice.weights.clone(), choice.ids.clone()
        weights[token], ids[token] = swap.weights[0], swap.ids[0]
        return Choice(weights, ids)

    with torch.inference_mode():
        with override_choice(model.get_submodule(layer.name), rule):
            model(input_ids=batch())
        handle.remove()
        alone = block.run(sample.rows, swap)
    assert torch.allclose(alone[0], outputs[0].reshape(24, -1)[token], atol=1e-6)
    assert not torch.allclose(alone[0], sample.rows.output[0], atol=1e-6)


def test_arguments_with_a_row_per_token_are_cut_and_others_kept():
    states, extra, fixed = torch.arange(24.0).view(2, 3, 4), torch.arange(6).view(2, 3), "fixed"
    kwargs = {"ids": extra, "flag": None, "table": torch.zeros(2, 5)}
    call = BlockCall((states, fixed), kwargs, (states.view(6, 4), "logits"))
    rows = call.rows(torch.tensor([4, 1]))
    args, kwargs = rows.call()
    assert call.tokens == 6
    assert args[0].tolist() == [states.view(6, 4)[[4, 1]].tolist()]
    assert args[1] == fixed
    assert kwargs["ids"].tolist() == [[4, 1]]
    assert kwargs["flag"] is None
    assert kwargs["table"].shape == (2, 5)
    assert rows.output.tolist() == states.view(6, 4)[[4, 1]].tolist()


def test_rows_join_and_flat_outputs_are_read_by_the_width_of_the_input():
    states = torch.arange(12.0).view(3, 4)
    rows = BlockCall((states,), {}, states.flatten()).rows(torch.tensor([0, 2]))
    joined = rows.join(rows.at_tokens(torch.tensor([1])))
    assert joined.output.tolist() == states[[0, 2, 2]].tolist()
    assert joined.call()[0][0].tolist() == states[[0, 2, 2]].tolist()
