"""Jumps at ties: the change of a layer's output and of the loss when two tied experts are swapped.

    jump    ‖y_swapped - y‖ / ‖y‖,    y the output of the layer's block for a token,

y_swapped the output with the expert of rank k + 1 in place of that of rank k (`swapped_choice`). At
a tie this is the height of the discontinuity. Both outputs come from the model's own block, run
again on its recorded inputs; a block that does not reproduce its recorded output is refused (Def.
10.2, 10.3). The harm of a flip is proportional to its jump; `GapJumpTable` shows which ties have
both a small gap and a large jump.

    Δ = Σ_{t > p} [ -log P_swapped(x_t | x_<t) + log P(x_t | x_<t) ]   in nats

is the change of a sequence's loss by one swap at position p of one layer. All other choices are the
model's own, so consequences in later layers and tokens are part of Δ. Each row of a batch is a
sequence with exactly one swap; the reference is the same batch with the recorded choices forced at
the same positions, so both runs round alike (Def. 10.4).

`BlockSampler` selects the tokens while the model runs. Inputs and outputs of blocks are large, so
it keeps only the tokens that may be needed: those with the N smallest gaps so far, and those with
the N + R smallest hashes of their index, a random sample that does not depend on the batches. The
latter without the near tokens are a random sample of the others.

**Weights at a tie.** If the score of rank k + 1 is raised to z_[k], the router may choose its
expert j instead of the expert i of rank k. Expert j gets the weight that the family gives to the
selection score z_[k]. Without a correction bias both scores are then equal and j takes the weight
of i. With a bias b, the scores that determine the weights differ by the bias at the tie,

    w_j / w_i = s(z_[k] - b_j) / s(z_[k] - b_i),

s the function from ranked score to weight, and the weights of the chosen experts keep their sum if
the family renormalises them. Factors that belong to an expert move with it. Jumps at ties between
groups of experts are not measured (Def. 10.1). A smoothed router uses both experts near a tie; the
swap exchanges their shares, which are equal at the tie itself.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.analysis.inspect_records import (
    GapJumpTable,
    JumpMeasures,
    JumpSample,
    LayerJumps,
    LossJumps,
)
from tieline.core.errors import TielineError, UnsupportedModelError, require
from tieline.core.predictions import next_token_losses
from tieline.core.statistics import mean_estimate, quantile_bands, quantile_record
from tieline.measure.measures import gap_status
from tieline.models.families import RouterFamily, family_of
from tieline.models.parallel import full_tensor
from tieline.models.routed_block import Block, BlockCall, BlockRun, Rows, fitted_choice
from tieline.models.router_output import Choice, RouterOutput
from tieline.models.router_rule import combine_rule, family_scale, renormalises_weights
from tieline.run.forward import overridden_output
from tieline.run.observers import Observer, Rerun, RouteRecorder, Site, run_blocks
from tieline.run.plan import Pass
from tieline.run.ranks import Ranks
from tieline.trace.counts import HASH_SPAN, token_hash
from tieline.trace.record import LayerTrace, RoutingTrace, take_tokens

PerToken = Float[Tensor, " tokens"]
TokenIndices = Int[Tensor, " tokens"]


@dataclass(frozen=True)
class BlockSample:
    """Tokens of one layer by index in the trace, with the inputs and outputs of its block."""

    tokens: TokenIndices
    rows: Rows


class _TokenPool:
    """Keeps the tokens with the smallest keys so far, and their rows of the block.

    Random numbers, the lots, decide between equal keys.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys = torch.empty(0, dtype=torch.float64, device="cpu")
        self._lots = torch.empty(0, dtype=torch.float64, device="cpu")
        self.tokens = torch.empty(0, dtype=torch.int64, device="cpu")
        self._rows: Rows | None = None

    @property
    def filled(self) -> bool:
        """Whether the pool holds any token."""
        return self._rows is not None

    def offer(self, keys: PerToken, lots: PerToken, tokens: TokenIndices, call: BlockCall) -> None:
        """Add the tokens of a call and keep those with the smallest finite keys."""
        limit = self._keys[-1] if len(self._keys) == self._size else torch.inf
        new = ((keys <= limit) & keys.isfinite()).nonzero().squeeze(1)
        new = new[_order_by_keys(keys[new], lots[new])[: self._size]]
        if not len(new):
            return
        rows = call.rows(new)
        keys, lots = torch.cat([self._keys, keys[new]]), torch.cat([self._lots, lots[new]])
        best = _order_by_keys(keys, lots)[: self._size]
        self._keys, self._lots = keys[best], lots[best]
        self.tokens = torch.cat([self.tokens, tokens[new]])[best]
        self._rows = (rows if self._rows is None else self._rows.join(rows)).at_tokens(best)

    def tensors(self) -> dict[str, Tensor]:
        """Return the content of the pool as tensors with a row per token."""
        assert self._rows is not None
        inputs = {f"input.{index}": value for index, value in enumerate(self._rows.inputs.values())}
        columns = {"keys": self._keys, "lots": self._lots, "tokens": self.tokens}
        return columns | inputs | {"output": self._rows.output}

    def join(self, pooled: Mapping[str, Tensor]) -> None:
        """Keep the smallest keys of several pools, given their joined `tensors`."""
        assert self._rows is not None
        best = _order_by_keys(pooled["keys"], pooled["lots"])[: self._size]
        self._keys, self._lots = pooled["keys"][best], pooled["lots"][best]
        self.tokens, old = pooled["tokens"][best], self._rows
        inputs = {
            key: pooled[f"input.{index}"][best].to(value.device)
            for index, (key, value) in enumerate(old.inputs.items())
        }
        self._rows = Rows(inputs, old.others, pooled["output"][best].to(old.output), old.batched)

    def excluding(self, tokens: TokenIndices, most: int) -> BlockSample | None:
        """Return the first `most` tokens of the pool that are not among `tokens`."""
        rows = (~torch.isin(self.tokens, tokens)).nonzero().squeeze(1)[:most]
        if self._rows is None or not len(rows):
            return None
        return BlockSample(self.tokens[rows], self._rows.at_tokens(rows))


def _order_by_keys(keys: PerToken, lots: PerToken) -> TokenIndices:
    """Return the indices that sort by keys, then by lots."""
    by_lots = lots.sort(stable=True).indices
    return by_lots[keys[by_lots].sort(stable=True).indices]


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
        first_token: int = 0,
    ) -> None:
        """Sample `near` + `random` tokens of the blocks of the routers with these names.

        Args:
            blocks: blocks by name of their router.
            recorder: records the same passes, and is called before this observer.
            near: number of tokens nearest to a tie.
            random: number of other tokens.
            seed: seed of the random sample.
            first_token: index in the whole text of the first token of these passes.
        """
        self._blocks, self._recorder, self._first_token = blocks, recorder, first_token
        self.blocks = {name: block.module for name, block in blocks.items()}
        self._near, self._random, self._seed = near, random, seed
        self._pools = {name: (_TokenPool(near), _TokenPool(near + random)) for name in blocks}
        self._status: dict[str, str] = {}

    def watches(self, run: Pass) -> bool:
        """Return whether the recorder records the pass."""
        return self._recorder.watches(run)

    def on_block(self, run: Pass, site: Site, call: BlockCall, rerun: Rerun | None) -> None:
        """Sample from the call of a block, whose router has been recorded just before."""
        name = site.name
        layer = self._recorder.recorded(run, name)
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
        first = self._first_token + self._recorder.offset(run)
        tokens = first + torch.arange(len(gaps), device="cpu")
        lots = torch.as_tensor(
            token_hash(torch.full_like(tokens, self._seed), tokens) / HASH_SPAN, device="cpu"
        )
        near, random = self._pools[name]
        near.offer(gaps, lots, tokens, call)
        random.offer(torch.where(gaps.isfinite(), lots, torch.inf), lots, tokens, call)

    def join(self, ranks: Ranks) -> None:
        """Sample from the tokens of all processes."""
        if not ranks.share_text:
            return
        filled = torch.tensor(
            [[pool.filled for pool in pools] for pools in self._pools.values()], device="cpu"
        )
        filled_by_rank = ranks.join_rows({"filled": filled[None]})["filled"]
        require(
            bool((filled_by_rank == filled).all()),
            "a process saw no token between two experts in some layer: take fewer processes",
            TielineError,
        )
        for pool in (pool for pools in self._pools.values() for pool in pools if pool.filled):
            pool.join(ranks.join_rows(pool.tensors()))

    def block(self, name: str) -> Block:
        """Return the block of the router with this name."""
        return self._blocks[name]

    def status(self, name: str) -> str:
        """Return "ok" if the block of this router was called, else the reason."""
        uncalled = f"not answerable: the block {self.block(name).name!r} is not called as a module"
        return self._status.get(name, uncalled)

    def forget(self, name: str) -> None:
        """Drop the sample of a layer that has been measured."""
        self._pools[name] = (_TokenPool(self._near), _TokenPool(self._near + self._random))

    def near(self, name: str) -> BlockSample | None:
        """Return the tokens of a layer nearest to a tie, in order; None if there are none."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return self._pools[name][0].excluding(none, self._near)

    def random(self, name: str) -> BlockSample | None:
        """Return a random sample of the other tokens; None if there are none."""
        near, random = self._pools[name]
        return random.excluding(near.tokens, self._random)


BlockRunner = Callable[[Sequence[BlockRun]], list[Tensor]]
"""A function that runs blocks and returns their outputs."""

OUTPUT_TOLERANCE = 1e-3
"""Relative difference up to which a block counts as reproducing its output."""


@dataclass(frozen=True)
class JumpSettings:
    """Number of tokens whose experts are swapped in each layer, and levels of the results.

    Attributes:
        near: number of tokens with the smallest gaps.
        random: number of tokens drawn from the others.
        loss_swaps: number of near tokens for which the change of the loss is measured.
        dangerous_above: jump from which a tie counts as dangerous.
        probabilities: levels of the quantiles of the jump.
        gap_levels: levels of the gap quantiles that bound the rows of the table.
        jump_levels: levels of the jump quantiles that bound its columns.
        seed: seed of the random sample.
    """

    near: int = 256
    random: int = 256
    loss_swaps: int = 0
    dangerous_above: float = 0.1
    probabilities: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)
    gap_levels: tuple[float, ...] = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
    jump_levels: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.near >= 1, f"need at least one near token, got near={self.near}")
        least = min(self.random, self.loss_swaps, self.seed)
        require(least >= 0, "random, loss_swaps and seed must not be negative")
        for levels in (self.gap_levels, self.jump_levels):
            ends = len(levels) > 1 and levels[0] == 0 and levels[-1] == 1
            require(ends and sorted(levels) == list(levels), f"levels from 0 to 1, got {levels}")


def measure_jumps(
    model: nn.Module,
    trace: RoutingTrace,
    sampler: BlockSampler,
    settings: JumpSettings,
    progress: Callable[[int, int], None] | None = None,
    runner: BlockRunner | None = None,
) -> tuple[LayerJumps, ...]:
    """Measure the jumps of every layer.

    Args:
        model: the model, in the mode it was captured in.
        trace: its routing.
        sampler: the sampler that observed the same forward passes.
        settings: sample sizes and levels.
        progress: called with the number of finished layers and of all layers.
        runner: runs blocks; by default one after the other.
    """
    layer_jumps = []
    for layer in trace.layers:
        layer_jumps.append(
            _layer_jumps(model, trace, layer, sampler, settings, runner or run_blocks)
        )
        if progress is not None:
            progress(len(layer_jumps), len(trace.layers))
    return tuple(layer_jumps)


def _layer_jumps(
    model: nn.Module,
    trace: RoutingTrace,
    layer: LayerTrace,
    sampler: BlockSampler,
    settings: JumpSettings,
    runner: BlockRunner,
) -> LayerJumps:
    """Measure the jumps of one layer, or return why they cannot be measured."""
    status = _jump_status(layer, sampler)
    if status != "ok":
        return LayerJumps(layer.name, None, status)
    block, router = sampler.block(layer.name), model.get_submodule(layer.name)
    pools = [sampler.near(layer.name), sampler.random(layer.name)]
    ordered = [_sort_by_gap(layer, sample) for sample in pools if sample is not None]
    try:
        outputs = _plain_and_swapped_outputs(layer, block, router, ordered, runner)
        samples = [
            _jump_sample(trace, layer, block, sample, plain, swapped)
            for sample, (plain, swapped) in zip(ordered, outputs, strict=True)
        ]
    except UnsupportedModelError as problem:
        return LayerJumps(layer.name, None, f"not answerable: {problem}")
    near, random = (*samples, EMPTY_SAMPLE)[:2]
    return LayerJumps(layer.name, _jump_measures(layer, block, near, random, settings))


def _plain_and_swapped_outputs(
    layer: LayerTrace,
    block: Block,
    router: nn.Module,
    samples: Sequence[BlockSample],
    runner: BlockRunner,
) -> list[tuple[Tensor, Tensor]]:
    """Return each sample's outputs with recorded and with swapped choices, in one run of the block.

    One run, because even few tokens need most of a layer's experts and reading their weights
    dominates the cost.
    """
    tokens = torch.cat([sample.tokens for sample in samples])
    choices = recorded_choice(layer, tokens), swapped_choice(layer, tokens, router)
    rows = reduce(Rows.join, [sample.rows for sample in samples])
    choice = Choice(*(torch.cat(columns) for columns in zip(*choices, strict=True)))
    (output,) = runner([block.prepared(rows.join(rows), choice)])
    sizes = [len(sample.tokens) for sample in samples]
    plain, swapped = (half.split(sizes) for half in output.chunk(2))
    return list(zip(plain, swapped, strict=True))


def _sort_by_gap(layer: LayerTrace, sample: BlockSample) -> BlockSample:
    """Sort the tokens of a sample by ascending gap."""
    order = layer.inner_gap[sample.tokens].sort(stable=True).indices
    return BlockSample(sample.tokens[order], sample.rows.at_tokens(order))


def _jump_status(layer: LayerTrace, sampler: BlockSampler) -> str:
    """Return "ok" if the jumps of a layer can be measured, else the reason."""
    status = gap_status(layer)
    status = sampler.status(layer.name) if status == "ok" else status
    if status != "ok":
        return status
    if sampler.near(layer.name) is None:
        return "not answerable: no token has an expert that could enter"
    return "ok"


EMPTY_SAMPLE = JumpSample((), (), (), (), (), (), ())


def _jump_sample(
    trace: RoutingTrace,
    layer: LayerTrace,
    block: Block,
    sample: BlockSample,
    plain: Tensor,
    swapped: Tensor,
) -> JumpSample:
    """Return the record of sampled tokens from their outputs with plain and swapped choices."""
    tokens, k = sample.tokens, layer.facts.k
    _check_reproduced(plain, sample.rows.output, block.name)
    columns = (
        tokens,
        trace.documents[tokens],
        trace.positions[tokens],
        layer.inner_gap[tokens],
        relative_change(plain, swapped),
        layer.experts[tokens, k - 1],
        layer.experts[tokens, k],
    )
    return JumpSample(*(tuple(column.tolist()) for column in columns))


def relative_change(
    before: Float[Tensor, "tokens dim"], after: Float[Tensor, "tokens dim"]
) -> PerToken:
    """Return ‖after - before‖ / ‖before‖ of each row in float64; 0 if nothing changes, as 0 / 0."""
    change = (after.double() - before.double()).norm(dim=1).cpu()
    size = before.double().norm(dim=1).cpu()
    return torch.where(change == 0, 0.0, change / size)


def _check_reproduced(
    output: Float[Tensor, "tokens dim"], recorded: Float[Tensor, "tokens dim"], block: str
) -> None:
    """Raise if a block does not reproduce its output on some of its tokens."""
    error = (output.double() - recorded.double()).norm() / recorded.double().norm().clamp(min=1e-30)
    tolerance = max(OUTPUT_TOLERANCE, 8 * torch.finfo(recorded.dtype).eps)
    require(
        bool(error <= tolerance),
        f"the block {block!r} does not reproduce its output on some of its tokens "
        f"(relative difference {error.item():.2g})",
        UnsupportedModelError,
    )


def _jump_measures(
    layer: LayerTrace,
    block: Block,
    near: JumpSample,
    random: JumpSample,
    settings: JumpSettings,
) -> JumpMeasures:
    """Compute quantiles, dangerous share and gap-jump table of a layer."""
    jumps, random_jumps = (
        torch.tensor(x.jumps, dtype=torch.float64, device="cpu") for x in (near, random)
    )
    dangerous, levels = (jumps >= settings.dangerous_above).double(), settings.probabilities
    return JumpMeasures(
        module=block.name,
        near=near,
        random=random,
        near_quantiles=quantile_record(jumps, levels),
        random_quantiles=quantile_record(random_jumps, levels) if random.jumps else None,
        dangerous=mean_estimate(dangerous),
        dangerous_above=settings.dangerous_above,
        table=gap_jump_table(layer.inner_gap, near, random, settings),
    )


def gap_jump_table(
    gaps: PerToken, near: JumpSample, random: JumpSample, settings: JumpSettings
) -> GapJumpTable:
    """Return joint counts of gap and jump on quantile bins, and estimated shares of all tokens.

    Args:
        gaps: gaps of all tokens; tokens with infinite gaps cannot flip and are in no cell.
        near: the tokens with the smallest gaps, with weight one each.
        random: a random sample of the others, weighted to represent all of them.
        settings: levels of the bins.
    """
    finite = gaps[gaps.isfinite()]
    sampled = torch.tensor(near.gaps + random.gaps, dtype=torch.float64, device="cpu")
    jumps = torch.tensor(near.jumps + random.jumps, dtype=torch.float64, device="cpu")
    rows = quantile_bands(finite, settings.gap_levels).value
    columns = quantile_bands(jumps, settings.jump_levels).value
    weight = (len(finite) - len(near.gaps)) / max(1, len(random.gaps))
    weights = torch.tensor([1.0] * len(near.gaps) + [weight] * len(random.gaps), device="cpu")
    cell = _bin_indices(sampled, rows) * (len(columns) - 1) + _bin_indices(jumps, columns)
    shape = (len(rows) - 1, len(columns) - 1)
    counts = torch.bincount(cell, minlength=math.prod(shape)).view(shape)
    weighted = torch.bincount(cell, weights.double(), minlength=math.prod(shape)).view(shape)
    return GapJumpTable(
        gap_levels=settings.gap_levels,
        gap_edges=tuple(rows.tolist()),
        jump_edges=tuple(columns.tolist()),
        counts=tuple(tuple(row) for row in counts.tolist()),
        shares=tuple(tuple(row) for row in (weighted / len(gaps)).tolist()),
    )


def _bin_indices(values: PerToken, edges: Float[Tensor, " edges"]) -> Tensor:
    """Return the bin of each value, low <= value < high; the last bin includes its upper edge."""
    return (torch.searchsorted(edges, values, right=True) - 1).clamp(0, len(edges) - 2)


def jumps_with_losses(
    model: nn.Module,
    trace: RoutingTrace,
    layer: LayerTrace,
    jumps: JumpMeasures,
    swaps: int,
    batch_size: int,
) -> JumpMeasures:
    """Add the change of the loss for `swaps` tokens of a layer's near sample to its jumps.

    The tokens are spread evenly over the sample, without last tokens of sequences, because nothing
    is predicted after them.
    """
    near = jumps.near
    candidates = _tokens_with_successor(trace, near)
    if not candidates:
        return jumps
    count = min(swaps, len(candidates))
    swapped = [candidates[i * len(candidates) // count] for i in range(count)]
    tokens = torch.tensor([near.tokens[index] for index in swapped], device="cpu")
    changes = loss_changes(model, trace, layer, tokens, batch_size)
    losses: list[float | None] = [None] * len(near.tokens)
    for index, change in zip(swapped, changes.tolist(), strict=True):
        losses[index] = change
    sizes = quantile_record(changes.abs(), jumps.near_quantiles.probabilities)
    loss = LossJumps(mean_estimate(changes), sizes, len(swapped))
    return replace(jumps, near=replace(near, losses=tuple(losses)), loss=loss)


def loss_changes(
    model: nn.Module,
    trace: RoutingTrace,
    layer: LayerTrace,
    tokens: Int[Tensor, " swaps"],
    batch_size: int,
) -> Float[Tensor, " swaps"]:
    """Compute the change of the loss Δ by a swap at each token, in float64.

    Args:
        model: a causal language model, in evaluation mode.
        trace: its routing.
        layer: the layer of the trace in which the choice is swapped.
        tokens: indices of the tokens in the trace.
        batch_size: number of sequences per forward pass.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    sequences = [trace.tokens[trace.documents == trace.documents[t]].long() for t in tokens]
    for index, sequence in enumerate(sequences):
        by_length[len(sequence)].append(index)
    changes = torch.zeros(len(tokens), dtype=torch.float64, device="cpu")
    for indices in by_length.values():
        for chunk in torch.tensor(indices, device="cpu").split(batch_size):
            ids = torch.stack([sequences[index] for index in chunk.tolist()])
            changes[chunk] = _loss_changes_of_batch(model, trace, layer, tokens[chunk], ids)
    return changes


def _loss_changes_of_batch(
    model: nn.Module, trace: RoutingTrace, layer: LayerTrace, tokens: Tensor, ids: Tensor
) -> Float[Tensor, " rows"]:
    """Compute the change of the loss by one swap in each sequence of a batch."""
    router, positions = model.get_submodule(layer.name), trace.positions[tokens].long()
    rows = torch.arange(len(ids), device="cpu") * ids.shape[1] + positions
    losses = []
    for choice in (recorded_choice(layer, tokens), swapped_choice(layer, tokens, router)):
        rule = partial(_override_rows, rows=rows, choice=choice)
        output = overridden_output(model, router, rule, ids)
        losses.append(_loss_after_positions(output, ids, positions))
    return losses[1] - losses[0]


def _override_rows(output: RouterOutput, rows: Int[Tensor, " rows"], choice: Choice) -> Choice:
    """Return the router's own choice with these rows replaced by `choice`."""
    row_indices, choice = rows.to(output.ids.device), fitted_choice(choice, output.ids.shape[1])
    weights = output.weights.index_copy(0, row_indices, choice.weights.to(output.weights))
    return Choice(weights, output.ids.index_copy(0, row_indices, choice.ids.to(output.ids)))


def _loss_after_positions(
    output: object, ids: Int[Tensor, "rows length"], positions: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Return the summed loss of the tokens that follow each position, in float64."""
    logits = getattr(output, "logits", None)
    require(
        isinstance(logits, Tensor) and logits.shape[:2] == ids.shape,
        "the model gives no logits for its tokens, so it has no loss: inspect it without the loss",
        UnsupportedModelError,
    )
    assert isinstance(logits, Tensor)
    losses = next_token_losses(logits, ids)
    return torch.stack(
        [row[position:].sum() for row, position in zip(losses, positions.tolist(), strict=True)]
    )


def _tokens_with_successor(trace: RoutingTrace, near: JumpSample) -> list[int]:
    """Return indices into the sample of tokens that are not the last one of their document."""
    tokens = torch.tensor(near.tokens, device="cpu")
    next_tokens = (tokens + 1).clamp(max=trace.n_tokens - 1)
    follows = (trace.documents[next_tokens] == trace.documents[tokens]) & (next_tokens > tokens)
    return follows.nonzero().squeeze(1).tolist()


TINY = 1e-30
"""Lower limit of weights in denominators."""


def recorded_choice(layer: LayerTrace, tokens: Int[Tensor, " chosen"]) -> Choice:
    """Return the experts and weights that the router chose for these tokens."""
    weights, experts = layer.combined()
    return Choice(weights[tokens], experts[tokens].long())


def swapped_choice(layer: LayerTrace, tokens: Int[Tensor, " chosen"], router: nn.Module) -> Choice:
    """Return the choice with the expert of rank k + 1 in place of the expert of rank k.

    Args:
        layer: a trace with at least k + 1 ranks.
        tokens: indices of the tokens in the trace.
        router: the layer's router, for the rules of its family.
    """
    family, k = family_of(router), layer.facts.k
    if family is None:
        raise UnsupportedModelError(f"{type(router).__name__} is no router of a known family")
    weights, ids = recorded_choice(layer, tokens)
    ids, weights, total = ids.clone(), weights.clone(), weights.sum(dim=1, keepdim=True)
    trace = take_tokens(layer, tokens)
    ids[:, k - 1] = trace.experts[:, k].long()
    entering = _entering_weight(trace, family, router)
    if layer.smoothed:  # the leaving expert takes the rank and the share of the entering one
        ids[:, k] = trace.experts[:, k - 1].long()
        weights[:, k] *= weights[:, k - 1] / entering.clamp(min=TINY)
    weights[:, k - 1] = entering
    if layer.bias is not None and renormalises_weights(family, router):
        weights *= total / weights.sum(dim=1, keepdim=True).clamp(min=TINY)
    return Choice(weights, ids)


def _entering_weight(trace: LayerTrace, family: RouterFamily, router: nn.Module) -> PerToken:
    """Return the weight of the entering expert before the weights are renormalised."""
    k = trace.facts.k
    assert trace.weights is not None
    leaving, entering = trace.experts[:, k - 1].long(), trace.experts[:, k].long()
    if family.skip_class:  # a skip has no weight that the entering expert could take
        return _weight_at_threshold(trace, family, router, entering)
    ratio = torch.ones(len(leaving), device="cpu")
    if trace.bias is not None:
        weight_of = partial(_weight_at_threshold, trace, family, router)
        ratio = weight_of(entering) / weight_of(leaving).clamp(min=TINY)
    scale = family_scale(family, router)
    if isinstance(scale, Tensor) and scale.numel() > 1:
        factor = full_tensor(scale.detach()).float().cpu()
        ratio = ratio * factor[entering] / factor[leaving]
    return trace.weights[:, k - 1] * ratio


def _weight_at_threshold(
    trace: LayerTrace,
    family: RouterFamily,
    router: nn.Module,
    experts: Int[Tensor, " tokens"],
) -> PerToken:
    """Return s(z_[k] - b_e), the weight of an expert whose selection score is at the threshold."""
    assert trace.scores is not None
    bias = 0.0 if trace.bias is None else trace.bias[experts]
    score = trace.scores[:, trace.facts.k - 1] - bias
    if trace.facts.units == "logits" and combine_rule(family, router) == "sigmoid":
        return score.sigmoid()
    return score.clamp(min=0)
