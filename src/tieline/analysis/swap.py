"""Running a few tokens of a routed layer again, with the experts of ranks k and k + 1 swapped.

    block_of         the module whose output is compared: the one that calls the router
    BlockCall        arguments and output of one call, token by token
    swapped_choice   the choice with the swap
    BlockSampler     keeps the inputs and outputs of blocks for a sample of the tokens

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

A smoothed router uses both experts near a tie. There the two exchange their shares, which at the
tie itself are equal: what is left of the jump is what the ramp makes of the gap.

`BlockSampler` selects the tokens while the model runs. The inputs and outputs of blocks are large,
so only those that may be needed are kept: the N smallest gaps so far, and the N + R smallest hashes
of token places, a random sample that does not depend on the batches. Without the near tokens, the
latter are a random sample of the others.
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

from tieline.core.errors import TielineError, UnsupportedModelError, require
from tieline.core.ranking import stable_topk
from tieline.models.families import RouterFamily, family_of
from tieline.models.router_call import Choice, RouterOutput, override_choice
from tieline.models.selection import combine_rule, family_scale, renormalises
from tieline.models.spread import full_tensor, gathered_weights, gathering_unit
from tieline.run.observers import BlockSite, Observer, Rerun, Site
from tieline.run.plan import Pass
from tieline.run.processes import Ranks
from tieline.run.recorder import RouteRecorder
from tieline.trace.record import SPAN, LayerTrace, take_tokens, token_hash

PerToken = Float[Tensor, " tokens"]
Places = Int[Tensor, " tokens"]
Key = int | str
"""Place or name of an argument."""

TINY = 1e-30

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
            return lambda: _states(self.module(states, ids, weights), states), gathered
        args, named = rows.call()
        family = family_of(self.router)
        counted = family is not None and family.counts_columns

        def rule(routed: RouterOutput) -> Choice:
            return fitted(choice, routed.ids.shape[1]) if counted else choice

        @contextmanager
        def scope() -> Iterator[None]:
            assert self.router is not None
            with gathered_weights(self.unit), override_choice(self.router, rule):
                yield

        return lambda: _states(self.module(*args, **named), states), scope


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
        positions = sorted(key for key in shaped if isinstance(key, int))
        named = {key: value for key, value in shaped.items() if isinstance(key, str)}
        return tuple(shaped[position] for position in positions), named


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


def _states(output: Any, like: Tensor) -> Float[Tensor, "tokens dim"]:
    """Hidden states (T, D) in a block's output, which may be flat or come with router logits."""
    states = output if isinstance(output, Tensor) else output[0]
    return states.reshape(-1, like.shape[-1])


def recorded_choice(layer: LayerTrace, tokens: Int[Tensor, " chosen"]) -> Choice:
    """What the router chose for these tokens."""
    weights, experts = layer.combined()
    return Choice(weights[tokens], experts[tokens].long())


def fitted(choice: Choice, slots: int) -> Choice:
    """The choice in as many slots as a router has, without the smallest weights."""
    weights, ids = choice
    if weights.shape[1] <= slots:
        return choice
    first = stable_topk(weights.abs(), slots).indices
    return Choice(weights.gather(1, first), ids.gather(1, first))


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
    ids[:, k - 1] = some.experts[:, k].long()
    entering = _entering_weight(some, family, router)
    if layer.smoothed:  # the expert that leaves takes the place and the share of the other
        ids[:, k] = some.experts[:, k - 1].long()
        weights[:, k] *= weights[:, k - 1] / entering.clamp(min=TINY)
    weights[:, k - 1] = entering
    if layer.bias is not None and renormalises(family, router):
        weights *= before / weights.sum(dim=1, keepdim=True).clamp(min=TINY)
    return Choice(weights, ids)


def _entering_weight(some: LayerTrace, family: RouterFamily, router: nn.Module) -> PerToken:
    """Weight that the entering expert gets in place of the leaving one, before normalisation."""
    k = some.facts.k
    assert some.weights is not None
    leaving, entering = some.experts[:, k - 1].long(), some.experts[:, k].long()
    if family.skip_class:  # to skip has no weight of its own to hand over
        return _raw_weight(some, family, router, entering)
    ratio = torch.ones(len(leaving))
    if some.bias is not None:
        raw = [_raw_weight(some, family, router, experts) for experts in (entering, leaving)]
        ratio = raw[0] / raw[1].clamp(min=TINY)
    scale = family_scale(family, router)
    if isinstance(scale, Tensor) and scale.numel() > 1:
        factor = full_tensor(scale.detach()).float().cpu()
        ratio = ratio * factor[entering] / factor[leaving]
    return some.weights[:, k - 1] * ratio


def _raw_weight(
    some: LayerTrace, family: RouterFamily, router: nn.Module, experts: Int[Tensor, " tokens"]
) -> PerToken:
    """s(z_[k] - b_e): the weight of an expert whose selection score is at the threshold."""
    assert some.scores is not None
    bias = 0.0 if some.bias is None else some.bias[experts]
    score = some.scores[:, some.facts.k - 1] - bias
    if some.facts.units == "logits" and combine_rule(family, router) == "sigmoid":
        return score.sigmoid()
    return score.clamp(min=0)


@dataclass(frozen=True)
class BlockSample:
    """Tokens of one layer by place in the trace, with the inputs and outputs of its block."""

    tokens: Places
    rows: Rows


class _Pool:
    """The tokens with the smallest keys so far and their rows; lots decide between equal keys."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys = torch.empty(0, dtype=torch.float64)
        self._lots = torch.empty(0, dtype=torch.float64)
        self.tokens = torch.empty(0, dtype=torch.int64)
        self._rows: Rows | None = None

    @property
    def filled(self) -> bool:
        """Whether any token is kept."""
        return self._rows is not None

    def offer(self, keys: PerToken, lots: PerToken, tokens: Places, call: BlockCall) -> None:
        """Keep the tokens with the smallest finite keys."""
        limit = self._keys[-1] if len(self._keys) == self._size else torch.inf
        fits = ((keys <= limit) & keys.isfinite()).nonzero().squeeze(1)
        fits = fits[_order(keys[fits], lots[fits])[: self._size]]
        if not len(fits):
            return
        rows = call.rows(fits)
        keys, lots = torch.cat([self._keys, keys[fits]]), torch.cat([self._lots, lots[fits]])
        best = _order(keys, lots)[: self._size]
        self._keys, self._lots = keys[best], lots[best]
        self.tokens = torch.cat([self.tokens, tokens[fits]])[best]
        self._rows = (rows if self._rows is None else self._rows.join(rows)).take(best)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is kept, a row per token."""
        assert self._rows is not None
        inputs = {f"input.{index}": value for index, value in enumerate(self._rows.inputs.values())}
        kept = {"keys": self._keys, "lots": self._lots, "tokens": self.tokens}
        return kept | inputs | {"output": self._rows.output}

    def join(self, pooled: Mapping[str, Tensor]) -> None:
        """Keep the best of what several pools have, given by `tensors` in the order of tokens."""
        assert self._rows is not None
        best = _order(pooled["keys"], pooled["lots"])[: self._size]
        self._keys, self._lots = pooled["keys"][best], pooled["lots"][best]
        self.tokens, old = pooled["tokens"][best], self._rows
        inputs = {
            key: pooled[f"input.{index}"][best].to(value.device)
            for index, (key, value) in enumerate(old.inputs.items())
        }
        self._rows = Rows(inputs, old.others, pooled["output"][best].to(old.output), old.batched)

    def without(self, tokens: Places, most: int) -> BlockSample | None:
        """Return the first `most` kept tokens that are not among `tokens`."""
        left = (~torch.isin(self.tokens, tokens)).nonzero().squeeze(1)[:most]
        if self._rows is None or not len(left):
            return None
        return BlockSample(self.tokens[left], self._rows.take(left))


def _order(keys: PerToken, lots: PerToken) -> Places:
    """Places in ascending order of keys, then of lots."""
    first = lots.sort(stable=True).indices
    return first[keys[first].sort(stable=True).indices]


class BlockSampler(Observer):
    """Keeps inputs and outputs of blocks for a sample of the tokens of recorded passes.

        recorder = RouteRecorder(model)
        sampler = BlockSampler(blocks, recorder, near=256, random=256, seed=0)
        Runner(Model(model)).run(plan, [recorder, sampler])

    Batches must not be padded.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        recorder: RouteRecorder,
        near: int,
        random: int,
        seed: int,
        first: int = 0,
    ) -> None:
        """Sample `near` + `random` tokens of the blocks of the routers with these names.

        Args:
            blocks: by name of the router.
            recorder: records the same passes, and is told of them before this observer.
            near: how many of the tokens nearest to a tie.
            random: how many of the others.
            seed: of the draw.
            first: place of the first token that is seen, in the whole text.
        """
        self._blocks, self._recorder, self._first = blocks, recorder, first
        self.blocks = {name: block.module for name, block in blocks.items()}
        self._near, self._random, self._seed = near, random, seed
        self._pools = {name: (_Pool(near), _Pool(near + random)) for name in blocks}
        self._status: dict[str, str] = {}

    def watches(self, run: Pass) -> bool:
        """Whether the recorder records the pass."""
        return self._recorder.watches(run)

    def on_block(self, run: Pass, site: Site, call: BlockSite, rerun: Rerun | None) -> None:
        """Handle the return of a block, whose router has been recorded just before."""
        name, rows = site.name, BlockCall(*call)
        layer = self._recorder.recorded(run, name)
        if layer is None or not layer.has_gaps:
            return
        gaps = layer.inner_gap
        if len(gaps) != rows.tokens:
            self._status[name] = (
                f"not answerable: the block {self._blocks[name].name!r} was given {rows.tokens} "
                f"rows for {len(gaps)} tokens; batches must not be padded"
            )
            return
        self._status.setdefault(name, "ok")
        tokens = self._first + self._recorder.offset(run) + torch.arange(len(gaps))
        lots = torch.as_tensor(token_hash(torch.full_like(tokens, self._seed), tokens) / SPAN)
        near, random = self._pools[name]
        near.offer(gaps, lots, tokens, rows)
        random.offer(torch.where(gaps.isfinite(), lots, torch.inf), lots, tokens, rows)

    def join(self, ranks: Ranks) -> None:
        """Sample from the tokens of all processes."""
        if ranks.share_text:
            self._join_rows(ranks.join_rows)

    def _join_rows(self, everywhere: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        """Sample from the tokens of all processes: `everywhere` returns the rows of all of them."""
        filled = torch.tensor([[pool.filled for pool in both] for both in self._pools.values()])
        ranks = everywhere({"filled": filled[None]})["filled"]
        require(
            bool((ranks == filled).all()),
            "a process saw no token between two experts in some layer: take fewer processes",
            TielineError,
        )
        for pool in (pool for both in self._pools.values() for pool in both if pool.filled):
            pool.join(everywhere(pool.tensors()))

    def block(self, name: str) -> Block:
        """The block of this router."""
        return self._blocks[name]

    def status(self, name: str) -> str:
        """Return "ok" if the block of this router was called, else the reason."""
        uncalled = f"not answerable: the block {self.block(name).name!r} is not called as a module"
        return self._status.get(name, uncalled)

    def forget(self, name: str) -> None:
        """Drop the tokens of a layer, which has been measured."""
        self._pools[name] = (_Pool(self._near), _Pool(self._near + self._random))

    def near(self, name: str) -> BlockSample | None:
        """Return the tokens of a layer nearest to a tie, in order; None if there are none."""
        return self._pools[name][0].without(torch.empty(0, dtype=torch.int64), self._near)

    def random(self, name: str) -> BlockSample | None:
        """Return a random sample of the other tokens; None if there are none."""
        near, random = self._pools[name]
        return random.without(near.tokens, self._random)
