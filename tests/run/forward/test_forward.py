"""Batches without padding, and a model that is left as it was."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.tiny import WIDTH, batch, tiny_model
from tieline.core.errors import TielineError
from tieline.models.configuration import text_config
from tieline.run.corpus import stacked_batches
from tieline.run.forward import forward, model_device, only_running


@given(st.lists(st.integers(1, 3), max_size=9), st.integers(1, 4))
def test_batches_keep_the_order_and_mix_no_lengths(lengths, size):
    sequences = [torch.full((length,), index) for index, length in enumerate(lengths)]
    batches = list(stacked_batches(sequences, size))
    assert [row.tolist() for stacked in batches for row in stacked] == [
        s.tolist() for s in sequences
    ]
    assert all(len(stacked) <= size for stacked in batches)
    for current, following in itertools.pairwise(batches):  # a batch ends only where it must
        assert len(current) == size or current.shape[1] != following.shape[1]


def test_modes_and_gradients_are_restored_also_after_an_error():
    model = tiny_model("olmoe").train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    with only_running(model):
        assert not any(module.training for module in model.modules())
        assert torch.is_inference_mode_enabled()
    assert [module.training for module in model.modules()] == before
    with pytest.raises(KeyError), only_running(model):
        raise KeyError
    assert [module.training for module in model.modules()] == before
    assert not torch.is_inference_mode_enabled()


def test_a_forward_pass_makes_no_cache():
    model = tiny_model("olmoe")
    assert forward(model, batch()).past_key_values is None
    assert torch.equal(forward(model, batch()).logits, model(input_ids=batch()).logits)


def test_models_without_memory_are_refused():
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(TielineError, match="no parameters in memory"):
        model_device(model)


def test_the_text_configuration_of_a_model():
    assert text_config(tiny_model("olmoe")).hidden_size == WIDTH
    assert text_config(torch.nn.Linear(2, 2)) is None


def test_without_predictions_the_head_runs_on_the_last_token_alone():
    model, ids, rows = tiny_model("olmoe"), batch(), []
    model.lm_head.register_forward_pre_hook(lambda head, args: rows.append(args[0].shape[1]))
    with only_running(model):
        logits = forward(model, ids).logits
        last = forward(model, ids, predicts=False).logits
    assert rows == [ids.shape[1], 1]
    assert torch.allclose(last, logits[:, -1:], atol=1e-6)
