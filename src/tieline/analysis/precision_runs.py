r"""The runs of an audit: each router perturbed by itself, and the whole model perturbed.

`LocalRuns`: while the clean model runs, each router is called again under each perturbation. Tokens
whose experts change are run through the layer's block once more with their new experts, which gives
the jump of its output. Gaussian noise of the logits is drawn until there are enough flips to
compare with their prediction.

`FullRuns`: the perturbation acts in every layer, so effects add up over depth.

    flips       share of tokens whose experts differ from those of the clean run, by layer
    moved       Σ_{e ∈ S \ S'} w_e / Σ_{e ∈ S} w_e: clean weight of the experts that a token lost
    loss        -log P(next token)
    KL          Σ_v P(v) log(P(v) / P'(v)), P of the clean run, P' of the perturbed one

The floor of the KL is that of a run in which flipping tokens get the experts and weights of the
clean run: what would remain if no token ever flipped.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tieline.analysis.jump import Runner, relative_change
from tieline.analysis.perturbations import Perturbation, applied, noise_generator, predicted_flips
from tieline.analysis.swap import Block, BlockCall, Rows, block_of
from tieline.core.errors import TielineError, UnsupportedModelError, require
from tieline.core.numerics import one_thread
from tieline.core.ranking import group_scores, sets_differ, topk_mask
from tieline.core.statistics import SequenceSums, kl_divergence, next_token_losses
from tieline.models.capture import Batch, Call, LayerObserver, ObserverSettings
from tieline.models.families import family_of
from tieline.models.router_call import (
    Choice,
    RouterOutput,
    override_choice,
    padded,
    read_output,
)
from tieline.models.running import forward
from tieline.models.selection import select
from tieline.trace.record import LayerTrace, take_tokens

RANKS = 16
"""Ranks beyond k that predictions see."""

MOST_REPEATS = 4000
"""Draws of noise at most, however rare flips are."""

CHUNK = 1 << 20
"""Scores that are drawn at once."""

SIGMA_TOKENS = 4096
"""Tokens whose scores are kept for the noise that flips 1 %."""


@dataclass
class LocalEffect:
    """What is counted of one perturbation in one layer."""

    flips: SequenceSums = field(default_factory=SequenceSums)
    low: SequenceSums = field(default_factory=SequenceSums)
    high: SequenceSums = field(default_factory=SequenceSums)
    damage: SequenceSums = field(default_factory=SequenceSums)
    seen: int = 0
    trials: int = 0


class _Change(NamedTuple):
    """Tokens whose experts change under a perturbation, and the experts they get."""

    tokens: Int[Tensor, " changed"]
    choice: Choice


class _Swap(NamedTuple):
    """Tokens of a block to run again with other experts, and where their jumps are counted."""

    effect: LocalEffect
    block: Block
    tokens: Int[Tensor, " changed"]
    rows: Rows
    choice: Choice


class LocalRuns:
    """Perturbs every router on its own while the clean model runs.

    with runs.watching(batch number, rows, length):
        forward(model, ids)
    runs.clean     weights and experts of each router for that batch
    runs.effects   what was counted, by perturbation and layer
    """

    def __init__(
        self,
        model: nn.Module,
        routers: dict[str, nn.Module],
        perturbations: Sequence[Perturbation],
        seed: int,
        flips_per_call: float,
        keep_every: int,
    ) -> None:
        """Watch these routers.

        Args:
            model: the model, in evaluation mode.
            routers: its routers by name.
            perturbations: of routers.
            seed: of the noise.
            flips_per_call: flips under Gaussian noise that each call of a router shall give.
            keep_every: of so many tokens the scores of one are kept.
        """
        self.routers, self.perturbations = routers, tuple(dict.fromkeys(perturbations))
        self.blocks = {name: block_of(model, name) for name in routers}
        settings = ObserverSettings(RANKS, (), False, False)
        self.observers = {name: _observer(name, r, settings) for name, r in routers.items()}
        self.seed, self.flips_per_call, self.keep_every = seed, flips_per_call, keep_every
        self.effects: dict[tuple[Perturbation, str], LocalEffect] = defaultdict(LocalEffect)
        self.clean: dict[str, Choice] = {}
        self.hits: dict[str, Tensor] = {}
        self.kept: dict[str, list[LayerTrace]] = defaultdict(list)

    @contextmanager
    def watching(self, batch: int, rows: int, length: int) -> Iterator[None]:
        """Watch one forward pass of (rows, length) tokens inside this context."""
        watch = LocalWatch(self, batch, (rows, length))
        self.clean = watch.clean
        with watch.watching():
            yield


class LocalWatch:
    """Watches the clean forward pass of one batch, for `LocalRuns`.

    Attributes:
        clean: weights and experts of each router that has run.
        jumps_later: whether blocks wait to be run again until `settle` is called.
    """

    def __init__(
        self, runs: LocalRuns, batch: int, shape: tuple[int, int], jumps_later: bool = False
    ) -> None:
        """Watch batch number `batch`, of so many rows and tokens in each."""
        self._runs, self._batch, self._shape = runs, batch, shape
        self.clean: dict[str, Choice] = {}
        self.jumps_later, self._busy = jumps_later, False
        self._changes: dict[str, dict[Perturbation, _Change]] = {}
        self._swaps: list[_Swap] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside this context, which may be entered again and again during the pass."""
        with ExitStack() as stack:
            for name, router in self._runs.routers.items():
                hook = partial(self._routed, name)
                stack.callback(router.register_forward_hook(hook, with_kwargs=True).remove)
                block = self._runs.blocks[name]
                hook = partial(self._blocked, name, block)
                stack.callback(block.module.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def _routed(
        self,
        name: str,
        router: nn.Module,
        args: tuple[Any, ...],
        named: dict[str, Any],
        output: Any,
    ) -> None:
        """Call a router again under every perturbation, after it returned."""
        if self._busy:
            return
        self._busy = True
        try:
            self._look(name, router, (args, named), output)
        finally:
            self._busy = False

    def _look(self, name: str, router: nn.Module, call: Call, output: Any) -> None:
        runs, tokens = self._runs, math.prod(self._shape)
        observer = runs.observers[name]
        layer = observer.observe(router, call, output, _batch(tokens))
        found = read_output(observer.family, router, call, output)
        self.clean[name] = Choice(found.weights, found.ids)
        chosen = routed_set(found)
        runs.hits[name] = chosen.sum(dim=0).cpu() + runs.hits.get(name, torch.tensor(0))
        runs.kept[name].append(take_tokens(layer, slice(None, None, runs.keep_every)))
        self._changes[name] = {}
        for place, perturbation in enumerate(runs.perturbations):
            source = noise_generator(runs.seed, place, self._batch, len(self.clean))
            with applied(router, perturbation, source):
                other = read_output(observer.family, router, call, router(*call[0], **call[1]))
            flipped = sets_differ(routed_set(other), chosen)
            effect = runs.effects[perturbation, name]
            self._count(effect, (layer, router, call), (perturbation, source), found, flipped)
            rows = flipped.nonzero().squeeze(1)
            choice = Choice(other.weights[rows], other.ids[rows])
            self._changes[name][perturbation] = _Change(rows, choice)

    def _count(
        self,
        effect: LocalEffect,
        routed: tuple[LayerTrace, nn.Module, Call],
        perturbed: tuple[Perturbation, torch.Generator],
        found: RouterOutput,
        flipped: Bool[Tensor, " tokens"],
    ) -> None:
        """Add the flips of one call, seen and predicted."""
        (layer, router, call), (perturbation, source) = routed, perturbed
        states = call[0][0] if call[0] else call[1]["hidden_states"]
        with one_thread():  # many small operations
            flat = states.reshape(-1, states.shape[-1])
            # the experts of a smoothed router change at the ends of its band, not at ties
            smooth = layer.smoothed
            chance = None if smooth else predicted_flips(layer, router, flat, perturbation)
        share, repeats = flipped.double().cpu(), 1
        if chance is not None:
            effect.low.add(chance.low.view(self._shape))
            effect.high.add(chance.high.view(self._shape))
            if perturbation.kind == "score noise":
                repeats = self._repeats(chance.low.sum().item())
                rule = partial(chosen_mask, router, call=call)
                share = _repeated(rule, found.logits, float(perturbation.level), repeats, source)
        effect.flips.add(share.view(self._shape))
        effect.seen += round(share.sum().item() * repeats)
        effect.trials += repeats * len(share)

    def _repeats(self, expected: float) -> int:
        wanted = self._runs.flips_per_call / max(expected, 1e-9)
        return max(1, min(MOST_REPEATS, math.ceil(wanted)))

    def _blocked(
        self,
        name: str,
        block: Block,
        module: nn.Module,
        args: tuple[Any, ...],
        named: dict[str, Any],
        output: Any,
    ) -> None:
        """After a block returned, take the tokens that would change, to be run again."""
        changes = self._changes.pop(name, None)
        if self._busy or changes is None:
            return
        call = BlockCall(args, named, output)
        for perturbation, (tokens, choice) in changes.items():
            effect, rows = self._runs.effects[perturbation, name], call.rows(tokens)
            self._swaps.append(_Swap(effect, block, tokens, rows, choice))
        if not self.jumps_later:
            self._busy = True
            try:
                self.settle()
            finally:
                self._busy = False

    def settle(self, runner: Runner | None = None) -> None:
        """Run the tokens that would change again with their new experts, and count their jumps.

        Args:
            runner: runs blocks; by default one after the other.
        """
        some = [swap for swap in self._swaps if len(swap.tokens)]
        if runner is None:
            outputs = iter([swap.block.run(swap.rows, swap.choice) for swap in some])
        else:
            outputs = iter(runner([swap.block.prepared(swap.rows, swap.choice) for swap in some]))
        for swap in self._swaps:
            jumps = torch.zeros(math.prod(self._shape), dtype=torch.float64)
            if len(swap.tokens):
                jumps[swap.tokens.cpu()] = relative_change(swap.rows.output, next(outputs))
            swap.effect.damage.add(jumps.view(self._shape))
        self._swaps = []


def routed_set(found: RouterOutput) -> Bool[Tensor, "tokens experts"]:
    """The chosen experts as a mask."""
    empty = torch.zeros_like(found.logits, dtype=torch.bool)
    return empty.scatter_(1, found.ids, True)


def chosen_mask(
    router: nn.Module, logits: Float[Tensor, "tokens experts"], call: Call
) -> Bool[Tensor, "tokens experts"]:
    """Return the experts that the router's family chooses by these logits, lower index first."""
    family = family_of(router)
    if family is None:
        raise TielineError(f"{type(router).__name__} is no router of a known family")
    selection = select(family, router, logits, call)
    scores, limit = selection.scores, selection.limit
    if limit is not None:
        groups = topk_mask(group_scores(scores, limit.n_groups, limit.score), limit.k_groups)
        inside = groups.repeat_interleave(scores.shape[-1] // limit.n_groups, dim=-1)
        scores = scores.masked_fill(~inside, limit.fill)
    return topk_mask(scores, int(attrgetter(family.k)(router)))


def _repeated(
    rule: Any, logits: Tensor, sigma: float, repeats: int, source: torch.Generator
) -> Float[Tensor, " tokens"]:
    """Share of `repeats` draws of noise in which each token's experts change."""
    tokens, experts = logits.shape
    clean = rule(logits)
    flips = torch.zeros(tokens, dtype=torch.float64)
    at_once = max(1, CHUNK // (tokens * experts))
    for start in range(0, repeats, at_once):
        count = min(at_once, repeats - start)
        noise = torch.randn(count, tokens, experts, generator=source).to(logits)
        noisy = (logits + sigma * noise).flatten(0, 1)
        changed = sets_differ(rule(noisy).view(count, tokens, experts), clean.expand(count, -1, -1))
        flips += changed.sum(dim=0).double().cpu()
    return flips / repeats


def _observer(name: str, router: nn.Module, settings: ObserverSettings) -> LayerObserver:
    family = family_of(router)
    assert family is not None
    return LayerObserver(name, family, settings)


def _batch(tokens: int) -> Batch:
    """A batch of all tokens in one document, which is all that the audit needs."""
    places = torch.arange(tokens)
    return Batch(places, torch.zeros_like(places), places, None, tokens)


@dataclass
class FullEffect:
    """What is counted of one perturbation over all layers."""

    flips: dict[str, SequenceSums] = field(default_factory=dict)
    any_layer: SequenceSums = field(default_factory=SequenceSums)
    moved: SequenceSums = field(default_factory=SequenceSums)
    shares: list[Tensor] = field(default_factory=list)
    loss: SequenceSums = field(default_factory=SequenceSums)
    kl: SequenceSums = field(default_factory=SequenceSums)
    floor: SequenceSums = field(default_factory=SequenceSums)


class FullRuns:
    """Runs one batch under perturbations beside its clean run."""

    def __init__(
        self,
        model: nn.Module,
        routers: dict[str, nn.Module],
        ids: Int[Tensor, "rows length"],
        clean: dict[str, Choice],
        logits: Float[Tensor, "rows length words"],
    ) -> None:
        """Compare with the choices and logits of the clean run of these tokens."""
        self._model, self._routers, self._ids = model, routers, ids
        self._clean, self._logits = clean, logits
        self._loss = next_token_losses(logits, ids)

    def add(self, effect: FullEffect, perturbation: Perturbation, source: torch.Generator) -> None:
        """Run the batch perturbed, and perturbed with clean routes; count what differs."""
        state = source.get_state()
        self.compare(effect, *self.run(perturbation, source, forced=False))
        floor, _ = self.run(perturbation, source.set_state(state), forced=True)
        self.compare_floor(effect, floor)

    def compare(
        self,
        effect: FullEffect,
        logits: Float[Tensor, "rows length words"],
        seen: dict[str, Tensor],
    ) -> None:
        """Count what differs in a perturbed run.

        Args:
            effect: where to.
            logits: of the run.
            seen: what each token lost in each layer, as `run` returns it.
        """
        shape, lost = tuple(self._ids.shape), []
        for name, share in seen.items():
            changed = (share >= 0).view(shape)
            effect.flips.setdefault(name, SequenceSums()).add(changed.double())
            lost.append(share.clamp(min=0))
        flipped = torch.stack([share >= 0 for share in seen.values()]).any(dim=0)
        moved = torch.stack(lost)
        effect.any_layer.add(flipped.double().view(shape))
        effect.moved.add(moved.mean(dim=0).view(shape))
        effect.shares.append(moved.flatten().float())
        effect.kl.add(kl_divergence(self._logits, logits))
        if self._ids.shape[1] > 1:
            effect.loss.add(next_token_losses(logits, self._ids) - self._loss)

    def compare_floor(self, effect: FullEffect, logits: Float[Tensor, "rows length words"]) -> None:
        """Count what differs in a perturbed run with clean routes."""
        effect.floor.add(kl_divergence(self._logits, logits))

    def kept(
        self,
        sums: SequenceSums,
        perturbation: Perturbation,
        source: torch.Generator,
        keep: Collection[str],
    ) -> None:
        """The KL of a run in which some routers are kept as they are."""
        with applied(self._model, perturbation, source, keep):
            logits = model_logits(forward(self._model, self._ids), self._ids)
        sums.add(kl_divergence(self._logits, logits))

    def run(
        self, perturbation: Perturbation, source: torch.Generator, forced: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits, and the weight that each token lost in each layer (-1 where it lost nothing).

        Args:
            perturbation: what to do.
            source: where noise comes from.
            forced: whether tokens whose experts change get the choice of the clean run.
        """
        seen: dict[str, Tensor] = {}
        with (
            applied(self._model, perturbation, source),
            compared_routes(self._routers, self._clean, seen, forced),
        ):
            logits = model_logits(forward(self._model, self._ids), self._ids)
        return logits, seen


@contextmanager
def compared_routes(
    routers: Mapping[str, nn.Module],
    clean: Mapping[str, Choice],
    seen: dict[str, Tensor],
    forced: bool,
) -> Iterator[None]:
    """Inside the block, what routers choose is compared with a clean run.

    Args:
        routers: the routers by name.
        clean: what they chose in the clean run.
        seen: gets the weight that each token lost in each layer, -1 where it lost nothing.
        forced: whether tokens whose experts change get the choice of the clean run.
    """
    with ExitStack() as stack:
        for name, router in routers.items():
            rule = partial(_rule, clean[name], seen, name, forced)
            stack.enter_context(override_choice(router, rule))
        yield


def _rule(
    clean: Choice, seen: dict[str, Tensor], name: str, forced: bool, found: RouterOutput
) -> Choice:
    """Record what the router chose; if `forced`, flipping tokens keep their clean experts."""
    before = routed_set(RouterOutput(found.logits, clean.weights, clean.ids))
    after = routed_set(found)
    flipped = sets_differ(before, after)
    lost = ~after.gather(1, clean.ids)
    size = clean.weights.double().sum(dim=1).clamp(min=1e-30)
    share = (clean.weights.double() * lost).sum(dim=1) / size
    seen[name] = torch.where(flipped, share, -1.0).cpu()
    own = Choice(found.weights, found.ids)
    if not forced:
        return own
    kept, own = padded(clean, own.ids.shape[1]), padded(own, clean.ids.shape[1])
    return Choice(
        torch.where(flipped[:, None], kept.weights, own.weights),
        torch.where(flipped[:, None], kept.ids, own.ids),
    )


def clean_logits(output: object, ids: Int[Tensor, "rows length"]) -> Tensor:
    """Return the logits of an unperturbed run; raises if some are not numbers."""
    logits = model_logits(output, ids)
    wrong = (~(logits < torch.inf)).flatten(0, 1).any(dim=1)  # minus infinity masks words
    require(
        not bool(wrong.any()),
        f"the model's logits are NaN or infinite for {int(wrong.sum())} of {len(wrong)} tokens "
        "although its weights are finite: run it in float32",
        UnsupportedModelError,
    )
    return logits


def model_logits(output: object, ids: Int[Tensor, "rows length"]) -> Tensor:
    """Return the logits (rows, length, words) of a model's output; raises if it has none."""
    logits = getattr(output, "logits", None)
    require(
        isinstance(logits, Tensor) and logits.shape[:2] == ids.shape,
        "the model gives no logits for its tokens, so damage to its predictions has no measure",
        UnsupportedModelError,
    )
    assert isinstance(logits, Tensor)
    return logits
