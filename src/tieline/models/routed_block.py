"""The block of a routed layer, and running some of its tokens again under another choice.

    block_of     the module whose output is that of the routed layer: the one that calls the router
    Block.run    its output for some tokens under a given choice
    BlockCall    arguments and output of one call, token by token

A Mixture-of-Experts block treats every token by itself, so the rows of some tokens can be run again
without the others. Where router and experts sit on the decoder layer itself (gemma4), whose
attention mixes tokens, the experts are the block.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.ranking import stable_topk
from tieline.models.families import family_of
from tieline.models.parallel import gathered_weights, gathering_unit
from tieline.models.router_output import Choice, RouterOutput, override_choice

Key = int | str
"""Place or name of an argument."""


BlockRun = tuple[Callable[[], Tensor], Callable[[], AbstractContextManager[Any]]]
"""A function that runs a block, and what must be in force while it runs."""


@dataclass(frozen=True)
class Block:
    """A module that maps tokens to a routed layer's output.

    Attributes:
        name: its qualified name.
        module: the module.
        router: the router that it calls; None for experts, which are given their choice.
        unit: what FSDP gathers around it; None where its weights are whole.
    """

    name: str
    module: nn.Module
    router: nn.Module | None
    unit: Any = None

    def run(self, rows: "Rows", choice: Choice) -> Float[Tensor, "tokens dim"]:
        """Output for these tokens under a given choice."""
        job, scope = self.prepared(rows, choice)
        with scope():
            return job()

    def prepared(self, rows: "Rows", choice: Choice) -> BlockRun:
        """The run of these tokens under a given choice, and what must be in force meanwhile."""
        states = next(iter(rows.inputs.values()))
        if self.router is None:
            ids = choice.ids.to(states.device)
            weights = choice.weights.to(states)
            gathered = partial(gathered_weights, self.unit)
            return lambda: _block_states(self.module(states, ids, weights), states), gathered
        args, keywords = rows.call()
        family = family_of(self.router)
        counted = family is not None and family.counts_columns

        def fitted_rule(routed: RouterOutput) -> Choice:
            return fitted_choice(choice, routed.ids.shape[1]) if counted else choice

        @contextmanager
        def run_scope() -> Iterator[None]:
            assert self.router is not None
            with gathered_weights(self.unit), override_choice(self.router, fitted_rule):
                yield

        return lambda: _block_states(self.module(*args, **keywords), states), run_scope


@dataclass(frozen=True)
class Rows:
    """Inputs and output of a block for some tokens.

    Attributes:
        inputs: arguments that have one row per token, by place or name.
        others: the remaining arguments.
        output: the block's output.
        batched: whether the block takes (rows, length, ...) instead of (tokens, ...).
    """

    inputs: dict[Key, Tensor]
    others: dict[Key, Any]
    output: Float[Tensor, "tokens dim"]
    batched: bool

    def at_tokens(self, index: Int[Tensor, " chosen"]) -> "Rows":
        """Some of the tokens."""
        inputs = {key: value[index.to(value.device)] for key, value in self.inputs.items()}
        return Rows(inputs, self.others, self.output[index.to(self.output.device)], self.batched)

    def join(self, other: "Rows") -> "Rows":
        """These tokens and then the others."""
        inputs = {key: torch.cat([value, other.inputs[key]]) for key, value in self.inputs.items()}
        return Rows(inputs, self.others, torch.cat([self.output, other.output]), self.batched)

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments to call the block with."""
        shaped = {k: v[None] if self.batched else v for k, v in self.inputs.items()} | self.others
        positions = sorted(key for key in shaped if isinstance(key, int))
        keywords = {key: value for key, value in shaped.items() if isinstance(key, str)}
        return tuple(shaped[position] for position in positions), keywords


@dataclass(frozen=True)
class BlockCall:
    """One call of a block as it happened."""

    args: tuple[Any, ...]
    named: Mapping[str, Any]
    output: Any

    @property
    def tokens(self) -> int:
        """Number of tokens of the call."""
        return len(_block_states(self.output, self._block_input))

    def rows(self, index: Int[Tensor, " chosen"]) -> Rows:
        """The rows of some tokens, copied: the activations themselves may be reused."""
        arguments: dict[Key, Any] = {**dict(enumerate(self.args)), **self.named}
        lead = self._block_input.shape[:-1]
        inputs, others = {}, {}
        for key, value in arguments.items():
            if isinstance(value, Tensor) and value.shape[: len(lead)] == lead:
                flat = value.detach().reshape(-1, *value.shape[len(lead) :])
                inputs[key] = flat[index.to(flat.device)]
            else:
                others[key] = value
        output = _block_states(self.output, self._block_input).detach()
        return Rows(inputs, others, output[index.to(output.device)], len(lead) == 2)

    @property
    def _block_input(self) -> Tensor:
        """The block's input: its first argument that is a tensor."""
        return next(x for x in (*self.args, *self.named.values()) if isinstance(x, Tensor))


def block_of(model: nn.Module, router_name: str) -> Block:
    """The block that calls a router: its parent, or the experts beside it on a decoder layer."""
    router = model.get_submodule(router_name)
    family = family_of(router)
    if family is not None and family.in_block:
        return Block(router_name, router, router, gathering_unit(model, router_name))
    name = router_name.rpartition(".")[0]
    parent = model.get_submodule(name)
    arguments = inspect.signature(parent.forward).parameters
    if "attention_mask" in arguments and hasattr(parent, "experts"):
        experts = f"{name}.experts".lstrip(".")
        unit = gathering_unit(model, experts)
        return Block(experts, parent.get_submodule("experts"), None, unit)
    return Block(name, parent, router, gathering_unit(model, name))


def _block_states(output: Any, like: Tensor) -> Float[Tensor, "tokens dim"]:
    """Hidden states (T, D) in a block's output, which may be flat or come with router logits."""
    states = output if isinstance(output, Tensor) else output[0]
    return states.reshape(-1, like.shape[-1])


def fitted_choice(choice: Choice, slots: int) -> Choice:
    """The choice in as many slots as a router has, without the smallest weights."""
    weights, ids = choice
    if weights.shape[1] <= slots:
        return choice
    first = stable_topk(weights.abs(), slots).indices
    return Choice(weights.gather(1, first), ids.gather(1, first))
