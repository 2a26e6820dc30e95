"""What one swap does to the loss, against a model that is run by hand."""

from dataclasses import replace

import pytest
import torch

from tests.analysis.walls import watched
from tests.models.tiny import CHOSEN, batch, lively, tiny_model
from tieline.analysis.jumps import JumpSettings, jumps_with_losses, loss_changes, measure_jumps
from tieline.core.errors import UnsupportedModelError
from tieline.models.router_output import Choice, override_choice


def losses_by_hand(model, router, row, ids, swap):
    """Loss of every prediction in one sequence after replacing the choice of one token."""

    def rule(choice):
        weights, experts = choice.weights.clone(), choice.ids.clone()
        weights[row], experts[row] = swap
        return Choice(weights, experts)

    with torch.inference_mode(), override_choice(router, rule):
        logits = model(input_ids=ids[None]).logits[0].double()
    return -logits[:-1].log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_changes_are_those_of_one_swap_in_one_sequence(batch_size):
    model = lively(tiny_model("olmoe"))
    first, second = batch(2, 12), batch(1, 7)
    trace, _ = watched(model, [first, second])
    layer, sequences = trace.layers[0], [first[0], first[1], second[0]]
    router = model.get_submodule(layer.name)
    tokens = torch.tensor([25, 3, 14, 5, 0])
    with torch.inference_mode():
        changes = loss_changes(model, trace, layer, tokens, batch_size)
    for token, change in zip(tokens.tolist(), changes.tolist(), strict=True):
        ids, row = sequences[int(trace.documents[token])], int(trace.positions[token])
        weights, chosen = layer.weights[token], layer.experts[token, :CHOSEN].long()
        swapped = torch.cat([chosen[:-1], layer.experts[token, CHOSEN : CHOSEN + 1].long()])
        before = losses_by_hand(model, router, row, ids, (weights, chosen))
        after = losses_by_hand(model, router, row, ids, (weights, swapped))
        assert torch.allclose(before[:row], after[:row], atol=1e-6), "no loss before the swap"
        assert change == pytest.approx((after - before).sum().item(), abs=2e-6)
    assert changes.abs().max() > 1e-4


def test_losses_are_put_beside_their_tokens_and_last_tokens_are_left_out():
    model = lively(tiny_model("olmoe"))
    trace, sampler = watched(model, [batch()], near=24)
    settings = JumpSettings(near=24, random=0)
    with torch.inference_mode():
        jumps = measure_jumps(model, trace, sampler, settings)[0].value
        with_losses = jumps_with_losses(model, trace, trace.layers[0], jumps, swaps=6, batch_size=4)
        every = jumps_with_losses(model, trace, trace.layers[0], jumps, swaps=99, batch_size=4)
    losses = [loss for loss in with_losses.near.losses if loss is not None]
    assert len(losses) == with_losses.loss.swaps == 6
    assert with_losses.loss.mean.value == pytest.approx(sum(losses) / 6)
    assert with_losses.loss.absolute.value[2] == sorted(map(abs, losses))[2]
    assert replace(with_losses, near=jumps.near, loss=None) == jumps
    ends = {index for index, at in enumerate(every.near.positions) if at == 11}
    unknown = {index for index, loss in enumerate(every.near.losses) if loss is None}
    assert unknown == ends
    assert len(ends) == 2


def test_a_sample_of_last_tokens_has_no_loss():
    model = lively(tiny_model("olmoe"))
    trace, sampler = watched(model, [batch(2, 1)], near=2)
    with torch.inference_mode():
        jumps = measure_jumps(model, trace, sampler, JumpSettings(near=2))[0].value
        assert jumps_with_losses(model, trace, trace.layers[0], jumps, 4, 4) is jumps


def test_a_model_without_logits_is_refused():
    model = lively(tiny_model("olmoe")).model
    trace, _ = watched(model, [batch()])
    with torch.inference_mode(), pytest.raises(UnsupportedModelError, match="no logits"):
        loss_changes(model, trace, trace.layers[0], torch.tensor([0]), 1)
