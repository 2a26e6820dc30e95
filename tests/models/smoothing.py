"""What the tests of smoothing share: models, and lines through ties."""

from dataclasses import replace

import torch

from tests.models.tiny import CORRECTIONS, EXPERTS, SUPPORTED, batch, lively, tiny_model
from tieline.models import find_routers
from tieline.models.band_width import Scores
from tieline.models.families import FAMILIES
from tieline.models.routed_block import BlockCall, block_of
from tieline.models.router_output import attach_handler, detach_handler
from tieline.models.smoothed_router import layer_plan, smoothing_refusal

SMOOTHED = [
    name
    for name in SUPPORTED
    if any(f.name == name and smoothing_refusal(f) is None for f in FAMILIES.values())
]
KINDS = [
    "afmoe",  # sigmoid, bias as argument
    "axk2",  # groups masked with 0
    "dbrx",  # in a method of the block, p-norm
    "deepseek_v2",  # softmax, best groups
    "deepseek_v3",  # sigmoid, bias, groups by two experts
    "deepseek_v4",  # sqrt of softplus
    "ernie4_5_moe",  # softmax + bias, clamped sum
    "gemma4",  # probabilities, a scale per expert
    "gpt_oss",  # softmax of the chosen, eager without sentinel
    "inkling",  # normalised with shared experts
    "jetmoe",  # slots sorted by expert, attention too
    "kolibri1",  # logits + bias, sigmoid
    "laguna",  # soft-capped
    "llama4",  # dense
    "longcat_flash",  # zero experts
    "mixtral",  # softmax, renormalised
    "olmoe",  # softmax, not renormalised
    "openai_privacy_filter",  # divided by k
]
"""One family for each kind of scoring."""

TIED = (2, 4, 6)
"""Experts that tie at the middle of a line, in three groups of two where there are groups."""


def states(output):
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def double_model(family, **changes):
    """A small model in float64 whose experts run as written."""
    model = lively(tiny_model(family, **changes)).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def tie_router(router, point, order):
    """Change the router so that `order` + 1 experts tie across the threshold k = 2 at `point`."""
    target = torch.full((EXPERTS,), 0.0, dtype=torch.float64)
    target[0], target[list(TIED[: order + 1])] = 2.0, 1.0
    for name, tensor in [*router.named_parameters(), *router.named_buffers()]:
        if "bias" in name and tensor.is_floating_point():
            tensor.zero_()
        elif tensor.ndim == 2 and len(tensor) >= EXPERTS:
            rows = tensor[:EXPERTS]
            rows += torch.outer(target - rows @ point, point) / point.dot(point)


def ffn_router(model):
    """Name of the last router of a feed-forward block that text runs through."""
    elsewhere = ("attention", "vision")
    return [n for n in find_routers(model) if not any(word in n for word in elsewhere)][-1]


class Layer:
    """A routed layer of a model as a function of the states of single tokens."""

    def __init__(self, model):
        self.name = ffn_router(model)
        self.router = model.get_submodule(self.name)
        self.block = block_of(model, self.name)
        self._model, self._rows = model, None
        handle = self.block.module.register_forward_hook(self._seen, with_kwargs=True)
        with torch.no_grad():
            model(input_ids=batch())
        handle.remove()

    def _seen(self, module, args, kwargs, output):
        self._rows = BlockCall(args, kwargs, output).rows(torch.tensor([0]))

    def tie(self, point, order):
        """Let `order` + 1 experts tie across the threshold at `point`, biases included."""
        module = self.block.module
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith(CORRECTIONS):
                tensor.zero_()
        tie_router(self.router, point, order)

    def __call__(self, points):
        """Outputs (N, D) for states (N, D)."""
        with torch.no_grad():
            if self.block.router is None:  # router and experts on the decoder layer itself
                _, weights, ids = self.router(points)
                return self.block.module(points, ids, weights)
            first, *others = self._rows.inputs
            inputs = {first: points} | {
                key: self._rows.inputs[key].expand(len(points), *self._rows.inputs[key].shape[1:])
                for key in others
            }
            args, kwargs = replace(self._rows, inputs=inputs).call()
            output = self.block.module(*args, **kwargs)
            output = output if isinstance(output, torch.Tensor) else output[0]
            return output.reshape(len(points), -1)


def selection_scores(layer, points):
    """Selection scores (N, E) of a layer's router for states (N, D)."""
    plan = layer_plan(layer.name, layer.router)
    kept = Scores(plan)
    attach_handler(plan.router, plan.family, kept)
    layer(points)
    detach_handler(plan.router)
    return kept.scores


def largest_step(layer, point, direction, steps):
    """Largest change of the layer's output between neighbours on a line, over its size."""
    offsets = torch.linspace(-1, 1, steps + 1, dtype=torch.float64)[:, None]
    outputs = layer(point + offsets * direction)
    return (outputs.diff(dim=0).norm(dim=1).max() / outputs.norm(dim=1).mean()).item()
