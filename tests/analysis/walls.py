"""The jump of a real block, found by walking through a wall: what the swap must agree with.

Two inputs of a block that are routed differently are joined by a segment; bisection finds the place
where the choice changes. The block's outputs on both sides are the truth about the jump there.
"""

import itertools
from dataclasses import dataclass

import torch

from tests.models.tiny import batch
from tieline.analysis.jumps import BlockSampler
from tieline.models import capture, family_of
from tieline.models.capture import DEFAULT_EPSILONS, LayerRecorder, RecorderSettings
from tieline.models.model import Model
from tieline.models.pass_tokens import Batch
from tieline.models.routed_block import Block, Rows, block_of
from tieline.models.router_output import Choice, override_choice
from tieline.run.observers import RouteRecorder
from tieline.run.plan import clean_plan
from tieline.run.runner import Runner
from tieline.trace import LayerTrace

HALVINGS = 40
NEAR = 1e-4


@dataclass(frozen=True)
class Wall:
    """Inputs on the near side of a wall, their routing, and the block's output on either side."""

    rows: Rows
    layer: LayerTrace
    before: torch.Tensor
    after: torch.Tensor


@dataclass(frozen=True)
class Walker:
    """Runs a block at points of the segment between two of its inputs."""

    name: str
    block: Block
    rows: Rows

    def wall(self, pair):
        """The wall between two inputs; None unless exchanging two experts crosses it."""
        first, last = self.chosen(pair, 0.0), self.chosen(pair, 1.0)
        if len(first - last) != 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.chosen(pair, middle) == first else (low, middle)
        (rows, _, before), (_, choice, after) = self.at(pair, low), self.at(pair, high)
        layer = self.observed(rows)
        k, then = layer.facts.k, set(choice.ids[0].tolist())
        swap = (first - then, then - first)
        ranks = tuple({expert} for expert in layer.experts[0, k - 1 : k + 1].tolist())
        if swap != ranks or layer.inner_gap[0] > NEAR:  # a wall between groups, or several at once
            return None
        return Wall(rows, layer, before, after)

    def chosen(self, pair, t):
        return set(self.at(pair, t)[1].ids[0].tolist())

    def at(self, pair, t):
        """Inputs, the router's choice, and the output at one point of the segment."""
        low, high = (self.rows.at_tokens(torch.tensor([token])) for token in pair)
        inputs = {
            key: torch.lerp(value, high.inputs[key], t) if value.is_floating_point() else value
            for key, value in low.inputs.items()
        }
        rows, choices = Rows(inputs, low.others, low.output, low.batched), []
        args, kwargs = rows.call()
        with override_choice(self.block.router, self.looking(choices)):
            output = self.block.module(*args, **kwargs)
        states = output if isinstance(output, torch.Tensor) else output[0]
        return rows, choices[0], states.reshape(1, -1).clone()

    def looking(self, choices):
        def look(choice):
            choices.append(choice)
            return Choice(choice.weights, choice.ids)

        return look

    def observed(self, rows):
        """The routing of one token, as a capture records it."""
        family, calls, choices = family_of(self.block.router), [], []
        args, kwargs = rows.call()
        handle = self.block.router.register_forward_hook(
            lambda module, args, kwargs, output: calls.append(((args, kwargs), output)),
            with_kwargs=True,
        )
        with override_choice(self.block.router, self.looking(choices)):
            self.block.module(*args, **kwargs)
        handle.remove()
        call, output = calls[0]
        if family.in_block:
            call, output = ((choices[0].logits,), {}), (choices[0].weights, choices[0].ids)
        zero = torch.zeros(1, dtype=torch.int64)
        observer = LayerRecorder(self.name, family, RecorderSettings(4, (), False, False))
        return observer.observe(self.block.router, call, output, Batch(zero, zero, zero, None, 1))


RECORDED = RecorderSettings(4, DEFAULT_EPSILONS, False, True)


def walls(model, most=2):
    """Some walls between the tokens of the model's first layer whose block is a module."""
    walker = _walker(model)
    pairs = itertools.permutations(range(len(walker.rows.output)), 2)
    candidates = (walker.wall(pair) for pair in pairs)
    return walker, list(itertools.islice((wall for wall in candidates if wall is not None), most))


def watched(model, ids, near=24, random=0):
    """Trace of a forward pass, and the sampler that watched it."""
    with torch.inference_mode(), capture(model) as recorder:
        model(input_ids=batch())
    names = [layer.name for layer in recorder.trace().layers]  # those that run on text
    return sampled(model, {name: block_of(model, name) for name in names}, ids, near, random)


def sampled(model, blocks, ids, near, random, seed=0, layers=None):
    """Trace of some batches, and the sampler that watched them."""
    recorder = RouteRecorder(model, RECORDED, layers or list(blocks))
    sampler = BlockSampler(blocks, recorder, near, random, seed)
    plan = clean_plan("forward", dict(enumerate(ids)))
    Runner(Model(model)).run(plan, [recorder, sampler])
    return recorder.trace(), sampler


def _walker(model):
    trace, sampler = watched(model, [batch()])
    name = next(x.name for x in trace.layers if sampler.near(x.name) is not None)
    return Walker(name, sampler.block(name), sampler.near(name).rows)
