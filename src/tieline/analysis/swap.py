"""Running a few tokens of a routed layer again, with the experts of ranks k and k + 1 swapped.

    block_of         the module whose output is compared: the one that calls the router
    BlockCall        arguments and output of one call, token by token
    swapped_choice   the choice with the swap

A Mixture-of-Experts block treats every token by itself, so the rows of some tokens can be run again
without the others. Where router and experts sit on the decoder layer itself (gemma4), whose
attention mixes tokens, the experts are the block.

Raise the score of rank k + 1 to z_[k], and the router may as well choose its expert j instead of
the expert i of rank k. Expert i leaves; j enters with the weight that the family gives to the
selection score z_[k]. Without a correction bias both scores are then equal and j takes over the
weight of i. With a bias b the scores that make the weights differ by it at the tie,

    w_j / w_i = s(z_[k] - b_j) / s(z_[k] - b_i),

s the function that turns what is ranked into a weight, and the weights of the chosen keep their sum
where the family renormalises them. Factors that belong to an expert go with it. The jump is thus
that of the layer's output across the wall nearest to the token in the order of its scores; at ties
between groups of experts it is not measured (Def. 10.1).
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import TraceError, UnsupportedModelError
from tieline.hf.families import RouterFamily, family_of
from tieline.hf.router_call import Choice, override_choice
from tieline.trace.ops import take_tokens
from tieline.trace.record import LayerTrace

Key = int | str
"""Place or name of an argument."""


@dataclass(frozen=True)
class Block:
    """A module that maps tokens to a routed layer's output.

    Attributes:
        name: its qualified name.
        module: the module.
        router: the router that it calls; None for experts, which are given their choice.
    """

    name: str
    module: nn.Module
    router: nn.Module | None

    def run(self, rows: "Rows", choice: Choice) -> Float[Tensor, "tokens dim"]:
        """Output for these tokens under a given choice."""
        states = next(iter(rows.inputs.values()))
        if self.router is None:
            ids = choice.ids.to(states.device)
            return _states(self.module(states, ids, choice.weights.to(states)), states)
        args, named = rows.call()
        with override_choice(self.router, lambda found: choice):
            return _states(self.module(*args, **named), states)


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

    def take(self, index: Int[Tensor, " chosen"]) -> "Rows":
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
        places = sorted(key for key in shaped if isinstance(key, int))
        named = {key: value for key, value in shaped.items() if isinstance(key, str)}
        return tuple(shaped[place] for place in places), named


@dataclass(frozen=True)
class BlockCall:
    """One call of a block as it happened."""

    args: tuple[Any, ...]
    named: Mapping[str, Any]
    output: Any

    @property
    def tokens(self) -> int:
        """Number of tokens of the call."""
        return len(_states(self.output, self._first))

    def rows(self, index: Int[Tensor, " chosen"]) -> Rows:
        """The rows of some tokens, copied: the activations themselves may be reused."""
        given: dict[Key, Any] = {**dict(enumerate(self.args)), **self.named}
        lead = self._first.shape[:-1]
        inputs, others = {}, {}
        for key, value in given.items():
            if isinstance(value, Tensor) and value.shape[: len(lead)] == lead:
                flat = value.detach().reshape(-1, *value.shape[len(lead) :])
                inputs[key] = flat[index.to(flat.device)]
            else:
                others[key] = value
        output = _states(self.output, self._first).detach()
        return Rows(inputs, others, output[index.to(output.device)], len(lead) == 2)

    @property
    def _first(self) -> Tensor:
        """The block's input: its first argument that is a tensor."""
        return next(x for x in (*self.args, *self.named.values()) if isinstance(x, Tensor))


def block_of(model: nn.Module, router_name: str) -> Block:
    """The block that calls a router: its parent, or the experts beside it on a decoder layer."""
    router = model.get_submodule(router_name)
    family = family_of(router)
    if family is not None and family.layout == "method":
        return Block(router_name, router, router)
    name = router_name.rpartition(".")[0]
    parent = model.get_submodule(name)
    arguments = inspect.signature(parent.forward).parameters
    if "attention_mask" in arguments and hasattr(parent, "experts"):
        return Block(f"{name}.experts".lstrip("."), parent.get_submodule("experts"), None)
    return Block(name, parent, router)


def _states(output: Any, like: Tensor) -> Float[Tensor, "tokens dim"]:
    """Hidden states (T, D) in a block's output, which may be flat or come with router logits."""
    states = output if isinstance(output, Tensor) else output[0]
    return states.reshape(-1, like.shape[-1])


PerToken = Float[Tensor, " tokens"]
TINY = 1e-30


def recorded_choice(layer: LayerTrace, tokens: Int[Tensor, " chosen"]) -> Choice:
    """What the router chose for these tokens."""
    if layer.weights is None:
        raise TraceError(f"layer {layer.name!r} has no combine weights: nothing can be swapped")
    return Choice(layer.weights[tokens], layer.experts[tokens, : layer.facts.k].long())


def swapped_choice(layer: LayerTrace, tokens: Int[Tensor, " chosen"], router: nn.Module) -> Choice:
    """The same with the expert of rank k + 1 in the place of that of rank k.

    Args:
        layer: a trace with at least k + 1 ranks.
        tokens: places of the tokens in it.
        router: the layer's router, for the facts of its family.
    """
    family, k = family_of(router), layer.facts.k
    if family is None:
        raise UnsupportedModelError(f"{type(router).__name__} is no router of a known family")
    weights, ids = recorded_choice(layer, tokens)
    ids, weights, before = ids.clone(), weights.clone(), weights.sum(dim=1, keepdim=True)
    some = take_tokens(layer, tokens)
    ids[:, -1] = some.experts[:, k].long()
    weights[:, -1] = _entering_weight(some, family, router)
    if layer.bias is not None and _renormalises(family, router):
        weights *= before / weights.sum(dim=1, keepdim=True).clamp(min=TINY)
    return Choice(weights, ids)


def _entering_weight(some: LayerTrace, family: RouterFamily, router: nn.Module) -> PerToken:
    """Weight that the entering expert gets in place of the leaving one, before normalisation."""
    k = some.facts.k
    assert some.weights is not None
    leaving, entering = some.experts[:, k - 1].long(), some.experts[:, k].long()
    if family.skip_class:  # to skip has no weight of its own to hand over
        return _raw_weight(some, family, entering)
    ratio = torch.ones(len(leaving))
    if some.bias is not None:
        raw = [_raw_weight(some, family, experts) for experts in (entering, leaving)]
        ratio = raw[0] / raw[1].clamp(min=TINY)
    scale = attrgetter(family.scale)(router) if family.scale else None
    if isinstance(scale, Tensor) and scale.numel() > 1:
        factor = scale.detach().float().cpu()
        ratio = ratio * factor[entering] / factor[leaving]
    return some.weights[:, -1] * ratio


def _raw_weight(
    some: LayerTrace, family: RouterFamily, experts: Int[Tensor, " tokens"]
) -> PerToken:
    """s(z_[k] - b_e): the weight of an expert whose selection score is at the threshold."""
    assert some.scores is not None
    bias = 0.0 if some.bias is None else some.bias[experts]
    score = some.scores[:, some.facts.k - 1] - bias
    if some.facts.units == "logits" and family.combine == "sigmoid":
        return score.sigmoid()
    return score.clamp(min=0)


def _renormalises(family: RouterFamily, router: nn.Module) -> bool:
    if family.renormalise in ("always", "never"):
        return family.renormalise == "always"
    return bool(attrgetter(family.renormalise)(router))
