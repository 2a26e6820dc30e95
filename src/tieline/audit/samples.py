"""Which tokens' jumps are measured, chosen while the model runs: the nearest to a tie, and others.

The inputs and outputs of the blocks are large, so only those of the tokens that may be needed are
kept: the N smallest gaps so far, and the N + R smallest hashes of the tokens' places, which are a
random sample however the text is cut into batches. What remains of the latter without the former
is a random sample of the tokens that are not near.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.audit.blocks import Block, BlockCall, Rows
from tieline.hf.recorder import Recorder
from tieline.trace.hashing import SPAN, token_hash

__all__ = ["BlockSample", "BlockSampler"]

PerToken = Float[Tensor, " tokens"]
Places = Int[Tensor, " tokens"]


@dataclass(frozen=True)
class BlockSample:
    """Tokens of one layer by their place in the trace, with what its block was given and made."""

    tokens: Places
    rows: Rows


class _Pool:
    """The tokens of the smallest keys seen so far, with their rows; equal keys draw lots."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys = torch.empty(0, dtype=torch.float64)
        self._lots = torch.empty(0, dtype=torch.float64)
        self.tokens = torch.empty(0, dtype=torch.int64)
        self._rows: Rows | None = None

    def offer(self, keys: PerToken, lots: PerToken, tokens: Places, call: BlockCall) -> None:
        """Take those of the tokens whose finite keys are smaller than those that are here."""
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

    def without(self, tokens: Places, most: int) -> BlockSample | None:
        """The first `most` of the tokens here that are not among `tokens`."""
        left = (~torch.isin(self.tokens, tokens)).nonzero().squeeze(1)[:most]
        if self._rows is None or not len(left):
            return None
        return BlockSample(self.tokens[left], self._rows.take(left))


def _order(keys: PerToken, lots: PerToken) -> Places:
    """Places in ascending order of the keys, equal keys in that of their lots."""
    first = lots.sort(stable=True).indices
    return first[keys[first].sort(stable=True).indices]


class BlockSampler:
    """Keeps what blocks were given and made for a sample of the tokens of a capture.

        sampler = BlockSampler(blocks, near=256, random=256, seed=0)
        with capture(model) as recorder, sampler.watching(recorder):
            model(input_ids=ids)

    Batches must not be padded.
    """

    def __init__(self, blocks: Mapping[str, Block], near: int, random: int, seed: int) -> None:
        """Sample `near` + `random` tokens of the blocks of the routers with these names."""
        self._blocks = blocks
        self._near, self._random, self._seed = near, random, seed
        self._pools = {name: (_Pool(near), _Pool(near + random)) for name in blocks}
        self._status: dict[str, str] = {}

    @contextmanager
    def watching(self, recorder: Recorder) -> Iterator[None]:
        """Look at the calls of the blocks inside this context."""
        with ExitStack() as stack:
            for name, block in self._blocks.items():
                hook = partial(self._seen, name, recorder)
                handle = block.module.register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _seen(
        self,
        name: str,
        recorder: Recorder,
        module: nn.Module,
        args: tuple[Any, ...],
        named: dict[str, Any],
        output: Any,
    ) -> None:
        """A block returned; its router has been recorded just before."""
        layer, call = recorder.under_way.get(name), BlockCall(args, named, output)
        if layer is None or not layer.has_gaps:
            return
        gaps = layer.inner_gap
        if len(gaps) != call.tokens:
            self._status[name] = (
                f"not answerable: the block {self._blocks[name].name!r} was given {call.tokens} "
                f"rows for {len(gaps)} tokens; batches must not be padded"
            )
            return
        self._status.setdefault(name, "ok")
        places = recorder.n_tokens + torch.arange(len(gaps))
        lots = torch.as_tensor(token_hash(torch.full_like(places, self._seed), places) / SPAN)
        near, random = self._pools[name]
        near.offer(gaps, lots, places, call)
        random.offer(torch.where(gaps.isfinite(), lots, torch.inf), lots, places, call)

    def block(self, name: str) -> Block:
        """The block of this router."""
        return self._blocks[name]

    def status(self, name: str) -> str:
        """Whether ("ok") the block of this router was seen at work, or why not."""
        uncalled = f"not answerable: the block {self.block(name).name!r} is not called as a module"
        return self._status.get(name, uncalled)

    def near(self, name: str) -> BlockSample | None:
        """The tokens of a layer that are nearest to a tie, in order; None if there are none."""
        return self._pools[name][0].without(torch.empty(0, dtype=torch.int64), self._near)

    def random(self, name: str) -> BlockSample | None:
        """A random sample of the others; None if there are none."""
        near, random = self._pools[name]
        return random.without(near.tokens, self._random)
