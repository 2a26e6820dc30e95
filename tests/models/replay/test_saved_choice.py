"""Routers whose choice changes when a pass is repeated, with and without a saved choice."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

from tests.models.tiny import batch, lively, tiny_model
from tieline.core.numerics import is_recomputing
from tieline.models import family_of
from tieline.models.replay import saved_choice_contexts


def drifting(model):
    """Change the routers' inputs when a pass is repeated, without changing the operations."""
    drift = 0.3 * torch.randn(2, 12, 32), torch.zeros(2, 12, 32)

    def moved(module, args):
        states = args[0]
        return (states + drift[not is_recomputing()].view(states.shape), *args[1:])

    for module in model.modules():
        if family_of(module) is not None:
            module.register_forward_pre_hook(moved)


def step(model):
    model.train()
    model.enable_input_require_grads()
    model(input_ids=batch()).logits.square().mean().backward()


@pytest.mark.cpu("torch ends the process where a hook raises in the backward thread of a device")
@pytest.mark.filterwarnings("ignore")
def test_a_flip_stops_the_backward_pass_unless_the_choice_is_saved():
    def checkpointed(**options):
        model = lively(tiny_model("olmoe", experts_implementation="eager")).requires_grad_(True)
        model.set_experts_implementation("eager")
        model.gradient_checkpointing_enable({"use_reentrant": False, **options})
        drifting(model)
        return model

    with pytest.raises(CheckpointError):
        step(checkpointed())
    model = checkpointed(context_fn=saved_choice_contexts)
    step(model)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_gradients_are_those_of_a_pass_without_checkpointing():
    grads = []
    for options in (None, {"use_reentrant": False, "context_fn": saved_choice_contexts}):
        model = lively(tiny_model("olmoe")).requires_grad_(True)
        if options is not None:
            model.gradient_checkpointing_enable(options)
        step(model)
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))
