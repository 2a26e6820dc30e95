"""The tokens whose jumps are measured, with the inputs and outputs of their blocks.

`BlockSampler` selects them while the model runs. The inputs and outputs of blocks are large, so
only those that may be needed are kept: the N smallest gaps so far, and the N + R smallest hashes of
token places, a random sample that does not depend on the batches. Without the near tokens, the
latter are a random sample of the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.errors import TielineError, require
from tieline.models.routed_block import Block, BlockCall, Rows
from tieline.run.observers import BlockSite, Observer, Rerun, Site
from tieline.run.plan import Pass
from tieline.run.ranks import Ranks
from tieline.run.recorder import RouteRecorder
from tieline.trace.summary import SPAN, token_hash

PerToken = Float[Tensor, " tokens"]
Places = Int[Tensor, " tokens"]


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
        fits = fits[_order_by_keys(keys[fits], lots[fits])[: self._size]]
        if not len(fits):
            return
        rows = call.rows(fits)
        keys, lots = torch.cat([self._keys, keys[fits]]), torch.cat([self._lots, lots[fits]])
        best = _order_by_keys(keys, lots)[: self._size]
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
        best = _order_by_keys(pooled["keys"], pooled["lots"])[: self._size]
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


def _order_by_keys(keys: PerToken, lots: PerToken) -> Places:
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
