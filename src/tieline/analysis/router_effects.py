r"""Effects of perturbations on each router by itself, on clean inputs: counted and predicted.

`LocalEffects` calls each router again under each perturbation while the clean model runs, on clean
inputs. Tokens whose experts change are run through the layer's block once more with their new
experts, which gives the jump of its output. Gaussian noise of the logits is drawn until there are
enough flips to compare with their prediction.

`predicted_flip_chances` predicts the flips of a router on clean inputs from its clean scores:

score noise    the quadrature of Def. 6.2 with σ
state noise    the same with σ_i = ρ rms(x) ‖w_i - w̄‖, w̄ the mean over experts
rounding       the same with the noise of a product of rounded numbers, then rounding of the
               result (Def. 7.5): σ_i² = Σ_d (w_id - w̄_d)² δx_d² + x_d² δw_id²

If groups of experts limit the choice, the upper limit includes the chance that two groups change
places (Def. 6.4), so the prediction is an interval; likewise if not all ranks were kept.

`sigma_for_flips` inverts the prediction for score noise: it returns the σ that changes the experts
of a given share of tokens. The share grows with σ, at first as f_gap(0) σ / √π (Def. 6.3), so it is
found by interpolation in log-log coordinates.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tieline.analysis.audit_records import SigmaForFlips
from tieline.analysis.jumps import relative_change
from tieline.core.errors import TielineError
from tieline.core.numerics import grid_step, one_thread, solve_increasing
from tieline.core.ranking import group_scores, sets_differ, topk_mask
from tieline.core.statistics import SequenceSums
from tieline.measure.noise_flips import (
    LogitView,
    either_probability,
    flip_limits_by_size,
    layer_group_flip_probability,
    logit_view,
)
from tieline.measure.rounding_flips import product_flip_probability
from tieline.models.capture import Call, LayerRecorder, RecorderSettings
from tieline.models.families import family_of
from tieline.models.linear_routers import logits_matrix, uncertified_tokens
from tieline.models.number_formats import Format, format_named
from tieline.models.pass_tokens import Batch
from tieline.models.routed_block import Block, BlockCall, Rows, block_of
from tieline.models.router_output import Choice, read_output
from tieline.models.router_rule import selection_scores
from tieline.run.condition import CLEAN, Condition, Perturbation, applied, noise_generator
from tieline.run.forward import Ids
from tieline.run.observers import Observer, Rerun, Site
from tieline.run.plan import Pass
from tieline.run.ranks import Ranks
from tieline.run.schedule import routed_set
from tieline.trace.record import LayerTrace, take_tokens

PerToken = Float[Tensor, " tokens"]


class FlipChance(NamedTuple):
    """Lower and upper limit of the probability that each token's experts change."""

    low: PerToken
    high: PerToken


def predicted_flip_chances(
    layer: LayerTrace,
    router: nn.Module,
    inputs: Float[Tensor, "tokens dim"],
    perturbations: Sequence[Perturbation],
) -> dict[Perturbation, FlipChance | None]:
    """Predict each token's chance to flip; None for logits that are not one matrix product.

    Quantities that do not depend on the perturbation are computed once, and noise of several sizes
    is integrated together.

    Args:
        layer: clean routing of these tokens.
        router: the layer's router, with its own weights.
        inputs: inputs of the router.
        perturbations: perturbations of a router.
    """
    view = logit_view(layer)
    if view.scores.shape[1] <= layer.facts.k:
        never = torch.zeros(len(view.scores), dtype=torch.float64, device="cpu")
        return dict.fromkeys(perturbations, FlipChance(never, never))
    product = _router_product(layer, router, inputs)
    chances: dict[Perturbation, FlipChance | None] = dict.fromkeys(perturbations)
    for kind in ("score noise", "state noise"):
        same_kind = [perturbation for perturbation in perturbations if perturbation.kind == kind]
        if same_kind and (kind == "score noise" or product is not None):
            noise = 1.0 if product is None or kind == "score noise" else product.state_noise
            sizes = [float(perturbation.level) for perturbation in same_kind]
            predictions = noise_flip_chances(layer, view, noise, sizes)
            chances.update(zip(same_kind, predictions, strict=True))
    for perturbation in perturbations:
        if perturbation.kind == "rounding" and product is not None:
            number_format = format_named(str(perturbation.level))
            chances[perturbation] = _rounding_flip_chance(layer, view, product, number_format)
    return chances


class RouterProduct(NamedTuple):
    """Factors of the matrix product that gives a router's logits, in float32.

    Attributes:
        inputs: x (T, D).
        weights: w (E, D).
        spread: (w_id - w̄_d)², w̄ the mean over experts.
        experts: expert of each kept rank.
    """

    inputs: Float[Tensor, "tokens dim"]
    weights: Float[Tensor, "experts dim"]
    spread: Float[Tensor, "experts dim"]
    experts: Int[Tensor, "tokens ranks"]

    @property
    def state_noise(self) -> Float[Tensor, "tokens ranks"]:
        """σ_i = rms(x) ‖w_i - w̄‖ of each rank, for noise of the inputs as large as the inputs."""
        size = self.inputs.double().square().mean(dim=1).sqrt()
        return size[:, None] * self.spread.double().sum(dim=1).sqrt()[self.experts]


def _router_product(
    layer: LayerTrace, router: nn.Module, inputs: Float[Tensor, "tokens dim"]
) -> RouterProduct | None:
    """Return the product that gives a router's logits; None if they are not one product."""
    matrix = logits_matrix(router)
    if matrix is None or matrix.shape[1] != inputs.shape[1]:
        return None
    w = matrix.detach().cpu()[: layer.facts.n_experts]
    spread = (w.double() - w.double().mean(dim=0)).square().float()
    return RouterProduct(inputs.detach().float().cpu(), w.float(), spread, layer.experts.long())


def noise_flip_chances(
    layer: LayerTrace,
    view: LogitView,
    noise: Float[Tensor, "tokens ranks"] | float,
    sizes: Sequence[float],
) -> list[FlipChance]:
    """Return flip chances under normal noise c σ of the logits, for each c of `sizes`."""
    k = layer.facts.k
    unkept_ranks = max(0, layer.facts.reachable - view.scores.shape[1])
    is_equal_noise = layer.bias is None or layer.facts.units == "logits"
    score_noise = noise if is_equal_noise else view.slope * noise
    limits = flip_limits_by_size(view.scores, k, score_noise, sizes, unkept_ranks)
    at_threshold = noise[:, k - 1] if isinstance(noise, Tensor) else noise
    return [
        FlipChance(low, _add_group_chance(high, layer, size * view.threshold_slope * at_threshold))
        for low, high, size in zip(*limits, sizes, strict=True)
    ]


def _rounding_flip_chance(
    layer: LayerTrace, view: LogitView, product: RouterProduct, number_format: Format
) -> FlipChance:
    """Return the flip chances under a product of rounded inputs and weights (Def. 7.5)."""
    (x, w, spread, ids), k = product, layer.facts.k
    variance = x.square() @ (number_format.weights(w) - w).square().T
    if number_format.activations is not None:
        variance += (number_format.activations(x) - x).square_() @ spread.T
    noise = variance.gather(1, ids).double().sqrt_()
    step = torch.zeros(len(x), dtype=torch.float64, device="cpu")
    if number_format.plain:
        logits = view.logits
        if logits is None:
            logits = (x.double() @ w.double().T).gather(1, ids)
        step = grid_step(logits, number_format.name)[:, k - 1]
    grid = step * view.slope[:, k - 1]
    inner = product_flip_probability(
        view.scores, k, noise * view.slope, grid, same_grid=layer.bias is None
    )
    inner = inner.clamp(0, 1)
    group_noise = (noise[:, k - 1].square() + step.square() / 12).sqrt() * view.threshold_slope
    return FlipChance(inner, _add_group_chance(inner, layer, group_noise))


def _add_group_chance(inner: PerToken, layer: LayerTrace, noise: PerToken) -> PerToken:
    """Add the chance that two groups change places if the layer chooses within groups."""
    if layer.group_gap is None:
        return inner
    return either_probability(inner, layer_group_flip_probability(layer, noise))


def sigma_for_flips(
    layers: Mapping[str, Sequence[LayerTrace]], share: float = 0.01
) -> SigmaForFlips:
    """Return the σ at which a share of tokens flips, for each layer and for the mean over layers.

    Args:
        layers: routing of the same tokens by layer, in pieces.
        share: share of tokens that flip.
    """
    views = {
        name: [(piece, logit_view(piece)) for piece in pieces] for name, pieces in layers.items()
    }
    with one_thread():
        by_layer = {
            name: solve_increasing(lambda s, p=pieces: _flip_rate(p, s), share)
            for name, pieces in views.items()
        }
        sigmas = [sigma for sigma in by_layer.values() if sigma is not None]
        start = sum(sigmas) / len(sigmas) if sigmas else 0.01

        def mean_flip_rate(sigma: float) -> float:
            """Return the predicted flip rate at σ, averaged over layers."""
            return sum(_flip_rate(pieces, sigma) for pieces in views.values()) / len(views)

        return SigmaForFlips(share, solve_increasing(mean_flip_rate, share, start), by_layer)


def _flip_rate(pieces: Sequence[tuple[LayerTrace, LogitView]], sigma: float) -> float:
    """Return the predicted share of tokens that flip, or its upper limit."""
    flips = tokens = 0.0
    for layer, view in pieces:
        ((_, high),) = noise_flip_chances(layer, view, 1.0, (sigma,))
        flips, tokens = flips + high.sum().item(), tokens + len(high)
    return flips / tokens


RANKS_BEYOND_K = 16
"""Number of ranks beyond k that are kept for predictions."""

MOST_REPEATS = 4000
"""Largest number of draws of noise, however rare flips are."""

CHUNK = 1 << 20
"""Number of noise values that are drawn at once."""

LEAST_CHANCE = 1e-12
"""Predicted chance of a flip below which no noise is drawn for a token."""

SIGMA_TOKENS = 4096
"""Number of tokens whose scores are kept to find the noise that flips 1 %."""


@dataclass
class LocalEffect:
    """Counts of one perturbation in one layer."""

    flips: SequenceSums = field(default_factory=SequenceSums)
    low: SequenceSums = field(default_factory=SequenceSums)
    high: SequenceSums = field(default_factory=SequenceSums)
    damage: SequenceSums = field(default_factory=SequenceSums)
    flip_count: int = 0
    trials: int = 0


class _ChangedTokens(NamedTuple):
    """Tokens whose experts change under a perturbation, and their new experts."""

    tokens: Int[Tensor, " changed"]
    choice: Choice


class _BlockRerun(NamedTuple):
    """Tokens of a block to run again with their new experts, and the effect to count jumps in."""

    effect: LocalEffect
    block: Block
    tokens: Int[Tensor, " changed"]
    rows: Rows
    choice: Choice


class _CleanPass:
    """State of the clean pass of one batch."""

    def __init__(self, batch: int, shape: tuple[int, int]) -> None:
        self.batch, self.shape, self.routers = batch, shape, 0
        self.changes: dict[str, dict[Perturbation, _ChangedTokens]] = {}
        self.reruns: list[_BlockRerun] = []

    @property
    def tokens(self) -> int:
        """Number of tokens of the batch."""
        return math.prod(self.shape)


class LocalEffects(Observer):
    """Perturbs every router on its own while the clean model runs.

    Attributes:
        effects: counts by perturbation and router.
        hits: number of tokens of each expert, by router.
        samples: routing of some of the tokens, by router, batch by batch.
        uncertified: tokens whose choice another order of summation may change, by router.
        uncertified_status: why no choice of a router can be certified, by router.
    """

    def __init__(
        self,
        model: nn.Module,
        routers: dict[str, nn.Module],
        perturbations: Sequence[Perturbation],
        seed: int,
        flips_per_call: float,
        sample_every: int,
    ) -> None:
        """Observe these routers.

        Args:
            model: the model, in evaluation mode.
            routers: its routers by name.
            perturbations: perturbations of routers.
            seed: seed of the noise.
            flips_per_call: flips under Gaussian noise to aim for in each call of a router.
            sample_every: step between the tokens whose routing is kept in `samples`.
        """
        self._perturbations = tuple(dict.fromkeys(perturbations))
        self._blocks = {name: block_of(model, name) for name in routers}
        self.blocks = {name: block.module for name, block in self._blocks.items()}
        settings = RecorderSettings(RANKS_BEYOND_K, (), False, False)
        self._layers = {name: _layer_recorder(name, r, settings) for name, r in routers.items()}
        self._seed, self._flips_per_call, self._sample_every = seed, flips_per_call, sample_every
        self.effects: dict[tuple[Perturbation, str], LocalEffect] = defaultdict(LocalEffect)
        self.hits: dict[str, Tensor] = {}
        self.samples: dict[str, list[LayerTrace]] = defaultdict(list)
        self.uncertified = {name: SequenceSums() for name in routers}
        self.uncertified_status: dict[str, str] = {}
        self._passes: dict[Pass, _CleanPass] = {}

    def watches(self, run: Pass) -> bool:
        """Return whether the pass is clean."""
        return run.condition == CLEAN

    def on_start(self, run: Pass, ids: Ids) -> None:
        """Start the clean pass of a batch."""
        if self.watches(run):
            self._passes[run] = _CleanPass(run.batch, (ids.shape[0], ids.shape[1]))

    def on_router(self, run: Pass, site: Site, call: Call, output: Any) -> None:
        """Call a router again under every perturbation."""
        clean, name, router = self._passes[run], site.name, site.module
        positions = torch.arange(clean.tokens, device="cpu")
        one_document = torch.zeros_like(positions)  # the audit needs no documents
        batch = Batch(positions, one_document, positions, None, clean.tokens)
        layer = self._layers[name].observe(router, call, output, batch)
        routed = read_output(site.family, router, call, output)
        chosen = routed_set(routed)
        clean.routers += 1
        self.hits[name] = chosen.sum(dim=0).cpu() + self.hits.get(name, 0)
        self.samples[name].append(take_tokens(layer, slice(None, None, self._sample_every)))
        clean.changes[name] = {}
        self._count_uncertified(clean, layer, router, call)
        chances = self._predict_chances(layer, router, call)
        for number, perturbation in enumerate(self._perturbations):
            generator = noise_generator(self._seed, number, clean.batch, clean.routers)
            with applied(router, Condition(perturbation), generator):
                perturbed_output = router(*call[0], **call[1])
                perturbed = read_output(site.family, router, call, perturbed_output)
            flipped = sets_differ(routed_set(perturbed), chosen)
            rows = flipped.nonzero().squeeze(1)
            choice = Choice(perturbed.weights[rows], perturbed.ids[rows])
            clean.changes[name][perturbation] = _ChangedTokens(rows, choice)
            effect, chance = self.effects[perturbation, name], chances[perturbation]
            share, repeats = flipped.double().cpu(), 1
            if chance is not None and perturbation.kind == "score noise":
                draws = self._flips_per_call / max(chance.low.sum().item(), 1e-9)
                repeats = max(1, min(MOST_REPEATS, math.ceil(draws)))
                rule, sigma = partial(chosen_mask, router, call=call), float(perturbation.level)
                possible = chance.high > LEAST_CHANCE
                share = _noisy_flip_shares(rule, routed.logits, possible, sigma, repeats, generator)
            _add_flips(effect, share.view(clean.shape), repeats, chance)

    def _count_uncertified(
        self, clean: _CleanPass, layer: LayerTrace, router: nn.Module, call: Call
    ) -> None:
        """Count the tokens of a call that no bound on rounding errors certifies."""
        uncertified = uncertified_tokens(router, layer, _router_inputs(call))
        if isinstance(uncertified, str):
            self.uncertified_status[layer.name] = uncertified
        else:
            self.uncertified[layer.name].add(uncertified.double().view(clean.shape))

    def _predict_chances(
        self, layer: LayerTrace, router: nn.Module, call: Call
    ) -> dict[Perturbation, FlipChance | None]:
        """Return the predicted flip chances of a call's tokens, by perturbation."""
        if layer.smoothed:  # its experts change at the ends of its band, not at ties
            return dict.fromkeys(self._perturbations)
        with one_thread():  # many small operations
            inputs = _router_inputs(call)
            return predicted_flip_chances(layer, router, inputs, self._perturbations)

    def on_block(self, run: Pass, site: Site, call: BlockCall, rerun: Rerun | None) -> None:
        """Collect the tokens of a block whose experts change, to be run again."""
        clean = self._passes[run]
        changes = clean.changes.pop(site.name, None)
        if changes is None:
            return
        block = self._blocks[site.name]
        for perturbation, (tokens, choice) in changes.items():
            effect, rows = self.effects[perturbation, site.name], call.rows(tokens)
            clean.reruns.append(_BlockRerun(effect, block, tokens, rows, choice))
        if rerun is not None:
            _count_jumps(clean, rerun)

    def on_unit_done(self, unit: str, rerun: Rerun) -> None:
        """Count the jumps of a unit while its weights are loaded."""
        for clean in self._passes.values():
            _count_jumps(clean, rerun)

    def join(self, ranks: Ranks) -> None:
        """Add up the counts of all processes."""
        if not ranks.share_text:
            return
        effects = list(self.effects.values())
        ranks.join_sums([sums for e in effects for sums in (e.flips, e.low, e.high, e.damage)])
        ranks.join_sums(list(self.uncertified.values()))
        counts = {
            "counts": torch.tensor(
                [[effect.flip_count, effect.trials] for effect in effects], device="cpu"
            )
        }
        counts |= {f"hits.{name}": hits for name, hits in self.hits.items()}
        joined = ranks.join_counts(counts)
        for effect, (flip_count, trials) in zip(effects, joined["counts"].tolist(), strict=True):
            effect.flip_count, effect.trials = flip_count, trials
        for name, layers in self.samples.items():
            self.hits[name] = joined[f"hits.{name}"]
            rows = ranks.join_lists([layer.rows() for layer in layers])
            self.samples[name] = [replace(layers[0], **row) for row in rows]


def _count_jumps(clean: _CleanPass, rerun: Rerun) -> None:
    """Run changed tokens again with their new experts, and count their jumps."""
    block_runs = [x.block.prepared(x.rows, x.choice) for x in clean.reruns if len(x.tokens)]
    outputs = iter(rerun(block_runs))
    for pending in clean.reruns:
        jumps = torch.zeros(clean.tokens, dtype=torch.float64, device="cpu")
        if len(pending.tokens):
            jumps[pending.tokens.cpu()] = relative_change(pending.rows.output, next(outputs))
        pending.effect.damage.add(jumps.view(clean.shape))
    clean.reruns = []


def _router_inputs(call: Call) -> Float[Tensor, "tokens dim"]:
    """Return the inputs of the tokens of a router's call."""
    states = call[0][0] if call[0] else call[1]["hidden_states"]
    return states.reshape(-1, states.shape[-1])


def chosen_mask(
    router: nn.Module, logits: Float[Tensor, "tokens experts"], call: Call
) -> Bool[Tensor, "tokens experts"]:
    """Return a mask of the experts that the router chooses by these logits; ties to lower index."""
    family = family_of(router)
    if family is None:
        raise TielineError(f"{type(router).__name__} is no router of a known family")
    selection = selection_scores(family, router, logits, call)
    scores, limit = selection.scores, selection.limit
    if limit is not None:
        groups = topk_mask(group_scores(scores, limit.n_groups, limit.score), limit.k_groups)
        inside = groups.repeat_interleave(scores.shape[-1] // limit.n_groups, dim=-1)
        scores = scores.masked_fill(~inside, limit.fill)
    return topk_mask(scores, family.chosen_count(router))


def _add_flips(
    effect: LocalEffect,
    share: Float[Tensor, "rows length"],
    repeats: int,
    chance: FlipChance | None,
) -> None:
    """Add the counted and predicted flips of one call to an effect."""
    if chance is not None:
        effect.low.add(chance.low.view(share.shape))
        effect.high.add(chance.high.view(share.shape))
    effect.flips.add(share)
    effect.flip_count += round(share.sum().item() * repeats)
    effect.trials += repeats * share.numel()


def _noisy_flip_shares(
    rule: Any,
    logits: Tensor,
    possible: Bool[Tensor, " tokens"],
    sigma: float,
    repeats: int,
    source: torch.Generator,
) -> Float[Tensor, " tokens"]:
    """Return the share of `repeats` draws of noise in which each token's experts change.

    Noise is drawn only for tokens in `possible`; the others count as unchanged.
    """
    flips = torch.zeros(len(logits), dtype=torch.float64, device="cpu")
    rows = possible.nonzero().squeeze(1)
    near_logits = logits[rows.to(logits.device)]
    tokens, experts = near_logits.shape
    if tokens == 0:
        return flips
    clean = rule(near_logits)
    chunk = max(1, CHUNK // (tokens * experts))
    for start in range(0, repeats, chunk):
        count = min(chunk, repeats - start)
        noise = torch.randn(count, tokens, experts, generator=source, device=source.device).to(
            near_logits
        )
        noisy = (near_logits + sigma * noise).flatten(0, 1)
        changed = sets_differ(rule(noisy).view(count, tokens, experts), clean.expand(count, -1, -1))
        flips[rows] += changed.sum(dim=0).double().cpu()
    return flips / repeats


def _layer_recorder(name: str, router: nn.Module, settings: RecorderSettings) -> LayerRecorder:
    """Return the observer that reads the calls of a router into traces."""
    family = family_of(router)
    assert family is not None
    return LayerRecorder(name, family, settings)
