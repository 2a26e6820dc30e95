r"""Change of a model's loss under a soft choice: measured, and predicted from its ties.

The hard choice of a layer is replaced by its soft form of width ε (`soft_choice`; where k = 1 a
temperature τ) and the loss is measured on a sample of sequences. To first order in the width only
tokens at a wall matter. There two experts share a seat: the second has the share a(g/ε) at gap g,
and the output of the layer is y + a Δ, Δ the jump. With ℓ(a) the change of the loss that this
makes in the layers above,

    dL/dε at 0⁺ = f_gap(0) · E[ ∫ ℓ(a(u)) du | gap = 0 ],
    ∫ ℓ(a(u)) du = M₁ ℓ'(0) + M₂ (ℓ(a*) - a* ℓ'(0)) / a*²,      M_j = ∫ a(u)^j du,  a* = M₃ / M₂,

exact for ℓ of degree three. ℓ'(0) = ∇L · Δ is the gradient of the loss times the jump, one backward
pass for all tokens; ℓ(a*) is one forward pass of the token's sequence, for a random part of them.

    softmax      a(u) = 1/(1 + eᵘ)            M = ln 2, ln 2 - ½, ln 2 - ⅝      (Paper 0, section 4)
    projection   a(u) = (1 - u)₊ / 2          M = ¼, 1/12, 1/32

For the squared loss of one layer this is `limits.sampled_slope` (Paper 0, Theorem 4.5).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.analysis.jumps import BlockSampler, recorded_choice, swapped_choice
from tieline.core.errors import UnsupportedModelError, require
from tieline.core.predictions import next_token_losses
from tieline.core.records import Result
from tieline.core.setting_fields import require_setting, takes_settings
from tieline.core.statistics import Estimate, clustered_ratio
from tieline.lab.command_settings import SoftenOptions, SoftenSettings
from tieline.lab.limits.temperature_limit import margin_constant
from tieline.lab.on_model.soft_choice import (
    MOMENTS,
    WallTokens,
    change_parts,
    choice_override,
    interpolated_choice,
    slope_parts,
    softened_routers,
)
from tieline.lab.on_model.subject import Progress, Subject, open_subject
from tieline.lab.on_model.upcycled_model import parameter_count
from tieline.measure.boundary import MarginTail, gap_density, margin_tail
from tieline.measure.measures import gap_status
from tieline.models.capture import RecorderSettings
from tieline.models.demo import DEMO
from tieline.models.experts import experts_of
from tieline.models.families import family_of
from tieline.models.model import Model, ModelSource
from tieline.models.routed_block import Block, block_of
from tieline.models.router_output import override_choice
from tieline.models.smoothed_router import plan_layers
from tieline.run.corpus import stacked_batches, token_texts
from tieline.run.forward import forward, only_running
from tieline.run.observers import Observer, Outcome, RouteRecorder
from tieline.run.plan import Pass, clean_plan
from tieline.run.runner import Runner
from tieline.trace.record import LayerTrace, RoutingTrace

COST_UNIT_TOKENS = 16384
"""Tokens of one unit of cost, a forward pass as `tieline inspect` runs by default."""
CLEAN_SETTINGS = RecorderSettings(ranks=4, epsilons=(), inputs=False, distances=True)
"""What is recorded of the clean run: four ranks beyond k, and distances to ties."""
MAX_DECIDING_TOKENS = 5
"""Number of deciding tokens listed per layer."""
NOT_PREDICTED = Estimate(None, None, "not predicted")


@dataclass(frozen=True)
class SoftLevel:
    """The loss of the softened model at one width.

    Attributes:
        width: τ for k = 1, ε for k > 1; for all layers together, a factor of their smallest widths.
        change: loss of the softened model minus that of the hard one, in nats per token.
        slope: the change over the width.
        missed: predicted slope minus `slope`, with the standard error of the paired difference;
            None without a prediction.
        expected: slope predicted to second order for the tokens of this sample at this width; None
            if tokens other than the near ones matter.
        ratio: measured change over the expected one, with the error of the paired difference.
    """

    width: float
    change: Estimate
    slope: Estimate
    missed: Estimate | None = None
    expected: Estimate | None = None
    ratio: Estimate | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the prediction is within 15 % or 3 standard errors; None without a prediction."""
        if self.missed is None or self.missed.value is None or self.slope.value is None:
            return None
        allowed = max(0.15 * abs(self.slope.value), 3 * (self.missed.standard_error or 0.0))
        return abs(self.missed.value) <= allowed


@dataclass(frozen=True)
class DecidingToken:
    """A token near a tie and its part of the predicted slope.

    Attributes:
        document: index of its document.
        position: position in the document.
        text: its text.
        layer: name of the router.
        leaving: the expert of rank k.
        entering: the expert of rank k + 1.
        gap: its gap.
        effect: change of the summed loss of its sequence, averaged over the width, in nats;
            negative if softening helps.
    """

    document: int
    position: int
    text: str
    layer: str
    leaving: int
    entering: int
    gap: float
    effect: float


@dataclass(frozen=True)
class SoftLayer:
    """One router softened alone.

    Attributes:
        name: name of the router.
        form: "softmax" at a temperature, or "projection" with a band.
        levels: measured losses, in ascending width.
        predicted: slope of the loss at width 0, from the tokens near ties.
        density: density of the gap at zero.
        tail: margin tail P(gap <= t) ~ C t^α (Paper 0, eq. 4.4).
        by_gradient: part of `predicted` that is linear in the jump: density × jump × gradient of
            the loss.
        constant: C_sh with |change| <= C_sh width^α (Theorem 4.5), from the largest gradient and
            jump measured; None if the tail is unknown.
        near: number of near tokens that the prediction is made from.
        exact: number of near tokens whose loss was recomputed with part of the jump.
        deciding: tokens with the largest parts of the slope, largest first.
        half: smallest number of tokens whose parts make up half of Σ |part|.
        status: "ok", or the reason for no prediction.
    """

    name: str
    form: str
    levels: tuple[SoftLevel, ...]
    predicted: Estimate
    density: Estimate
    tail: MarginTail
    by_gradient: float | None = None
    constant: float | None = None
    near: int = 0
    exact: int = 0
    deciding: tuple[DecidingToken, ...] = ()
    half: int = 0
    status: str = "ok"


@dataclass(frozen=True, repr=False)
class Softening(Result):
    """Loss against the width of the soft choice, layer by layer and for all layers together.

    Attributes:
        model: name of the model.
        layers: one record per router.
        together: all routers together, widths in units of their smallest ones.
        predicted: sum of the predicted slopes times the smallest widths.
        loss: loss of the hard model, in nats per token.
        tokens: tokens of the sample.
        sequences: sequences of the sample.
        cost: estimated cost of the run, in forward passes over 16,384 tokens.
        rounded_formats: formats below float32 among the model's weights.
        provenance: text, tokens, batch size and seed.
    """

    format: ClassVar[str] = "tieline-softening"

    model: str
    layers: tuple[SoftLayer, ...]
    together: tuple[SoftLevel, ...]
    predicted: Estimate
    loss: Estimate
    tokens: int
    sequences: int
    cost: float
    rounded_formats: tuple[str, ...]
    provenance: dict[str, object]

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers of all layers together: "loss", "predicted", and "change@F" at F widths."""
        values = {"loss": self.loss, "predicted": self.predicted}
        values |= {f"change@{level.width:g}": level.change for level in self.together}
        return {name: x.value for name, x in values.items() if x.value is not None}


@dataclass(frozen=True)
class SoftenSizes:
    """Sizes of the sample and of the widths.

    Attributes:
        tokens: tokens of the sample.
        length: tokens per sequence; short ones make the exact part of the prediction cheap.
        first: share of tokens inside the smallest band; every further band is twice as wide.
        levels: number of widths.
        near: share of tokens, those nearest to a tie, that the prediction is made from.
        exact: largest number of tokens per layer whose loss is recomputed.
        seed: seed of the choice of these tokens.
    """

    tokens: int = 4096
    length: int = 128
    first: float = 0.01
    levels: int = 5
    near: float = 0.08
    exact: int = 64
    seed: int = 0


def sizes_for_tokens(tokens: int) -> SoftenSizes:
    """Return sizes for a sample of `tokens` tokens, with `exact` in the default proportion."""
    usual = SoftenSizes()
    exact = max(usual.exact, tokens * usual.exact // usual.tokens)
    return replace(usual, tokens=tokens, exact=exact)


class _SofteningBaseline(NamedTuple):
    """The clean run: routing, sequences, and the summed loss and predictions of each sequence."""

    trace: RoutingTrace
    sequences: tuple[Tensor, ...]
    losses: Float[Tensor, " sequences"]
    counts: Float[Tensor, " sequences"]


def soften_cost(model: nn.Module, names: Sequence[str], settings: SoftenSizes) -> float:
    """Estimate the cost in forward passes over 16,384 tokens; experts run densely if k = 1."""
    plans = {plan.name: plan for plan in plan_layers(model, None)[0] if plan.name in names}
    sizes = {name: parameter_count(experts_of(model, name)) for name in plans}
    used = {n: sizes[n] * plan.k / plan.n_experts for n, plan in plans.items()}
    active = max(1.0, parameter_count(model) - sum(sizes.values()) + sum(used.values()))
    extra = [(sizes[n] - used[n]) / active if plan.k == 1 else 0.0 for n, plan in plans.items()]
    passes = 4 + settings.levels * (len(plans) + 1 + 2 * sum(extra))  # clean, gradient, levels
    exact_tokens = len(plans) * settings.exact * settings.length
    return (passes * settings.tokens + exact_tokens) / COST_UNIT_TOKENS


@takes_settings(SoftenSettings)
def soften(
    source: ModelSource = DEMO,
    *,
    sizes: SoftenSizes | None = None,
    settings: SoftenSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[SoftenOptions],
) -> Softening:
    """Measure the loss of a model against the width of a soft choice, and predict its slope.

    Args:
        source: a causal language model, not smoothed: a hub id, a folder, "demo" for the model in
            the box, or `(model, tokenizer)`.
        sizes: sizes of the sample and of the widths, by default `sizes_for_tokens(tokens)`; the
            seed is that of the settings, whatever it says.
        settings: the options; keyword arguments change single ones. A run that costs more than
            `max_cost` is refused before it begins.
        progress: called with stage, done and total.
    """
    settings = SoftenSettings.of(settings, options)
    sizes = sizes or sizes_for_tokens(settings.tokens)
    subject = open_subject(source, settings, "soften takes", sizes.length, sizes.tokens)
    length = len(subject.text.sequences[0])
    sizes = replace(sizes, tokens=subject.text.tokens, length=length, seed=settings.seed)
    cost = soften_cost(subject.model, subject.routers, sizes)
    require_setting(
        cost <= settings.max_cost,
        "softening costs about {cost} times a forward pass over {ordinary} tokens, more than "
        "{max_cost} {most}: raise it, or look at fewer {layers}",
        cost=f"{cost:.0f}",
        ordinary=f"{COST_UNIT_TOKENS:,}",
        most=f"{settings.max_cost:g}",
    )
    if progress is not None:
        progress(f"soften, about {cost:.0f} passes", 0, 1)
    return soften_sample(subject, sizes, settings.batch_size, cost, progress)


def soften_sample(
    subject: Subject,
    settings: SoftenSizes,
    batch_size: int = 8,
    cost: float = 0.0,
    progress: Progress | None = None,
) -> Softening:
    """Soften the routers of an open model; routers that cannot be smoothed are left out.

    Args:
        subject: the model and the sample.
        settings: sizes of the sample and of the widths.
        batch_size: sequences per forward pass.
        cost: estimate of `soften_cost`, for the record.
        progress: called with stage, done and total.
    """
    softenable = {plan.name for plan in plan_layers(subject.model, None)[0]}
    names = [name for name in subject.routers if name in softenable]
    return _SoftenRun(subject, names, settings, batch_size, progress).softening(cost)


def shell_constant(record: SoftLayer, layer: LayerTrace, walls: WallTokens) -> float | None:
    """Return C_sh of Theorem 4.5, with measured maxima of gradient and jump as its bounds."""
    alpha = record.tail.exponent.value
    if alpha is None:
        return None
    gaps = layer.gap
    C = margin_constant(gaps, alpha, least=max(1, min(100, len(gaps) // 20))).value or 0.0
    steepest = (walls.gradient.max() * walls.jump.max()).item()
    if record.form == "softmax":
        return steepest * (layer.facts.n_experts - 1) * C * math.gamma(alpha + 1)
    return steepest * C / 2


class _SoftenRun:
    """The clean run of a sample, and the softened runs and predictions beside it."""

    def __init__(
        self,
        subject: Subject,
        names: Sequence[str],
        settings: SoftenSizes,
        batch_size: int,
        progress: Progress | None,
    ) -> None:
        self._subject, self._model = subject, subject.model
        self._settings, self._batch_size = settings, batch_size
        self._sequences = tuple(s for s in subject.text.sequences if len(s) > 1)
        require(len(self._sequences) > 1, "softening needs two sequences of two tokens or more")
        self._pieces, self._progress = token_texts(subject.text), progress
        self._done, self._total = 0, 4 + settings.levels * (len(names) + 1) + len(names)
        self._sample, self._sampler = self._clean_sample(names)

    def softening(self, cost: float) -> Softening:
        """Soften every layer by itself, then all layers together."""
        sample = self._sample
        layers = [layer for layer in sample.trace.layers if gap_status(layer) == "ok"]
        require(bool(layers), "no layer has a choice that could be softened")
        gradients = self._output_gradients(layers)
        pairs = [self._soften_layer(layer, gradients) for layer in layers]
        records, predictions = zip(*pairs, strict=True)
        widths = {record.name: record.levels[0].width for record in records}
        prediction = _Prediction.of_all(predictions, list(widths.values()))
        dtypes = {p.dtype for p in self._model.parameters()} & {torch.bfloat16, torch.float16}
        return Softening(
            model=self._subject.name,
            layers=records,
            together=self._soft_levels(widths, 1.0, prediction),
            predicted=_mean_per_predicted_token(prediction.slope, sample),
            loss=clustered_ratio(sample.losses, sample.counts),
            tokens=sample.trace.n_tokens,
            sequences=len(sample.sequences),
            cost=cost,
            rounded_formats=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
            provenance=self._subject.provenance,
        )

    def _advance_progress(self, steps: int = 1) -> None:
        """Advance the progress by a number of passes."""
        self._done += steps
        if self._progress is not None:
            self._progress("soften", min(self._done, self._total), self._total)

    def _clean_sample(self, names: Sequence[str]) -> tuple[_SofteningBaseline, BlockSampler]:
        """Run the model unchanged; return its trace and losses, and a sampler of near tokens."""
        tokens = sum(map(len, self._sequences))
        near = max(8, round(self._settings.near * tokens))
        blocks = {name: block_of(self._model, name) for name in names}
        recorder = RouteRecorder(self._model, CLEAN_SETTINGS, names)
        sampler = BlockSampler(blocks, recorder, near, 1, self._settings.seed)
        losses = _SequenceLossObserver()
        numbered = dict(enumerate(stacked_batches(self._sequences, self._batch_size)))
        plan = clean_plan("soften", numbered, logits="optional")
        Runner(Model(self._model)).run(plan, [recorder, sampler, losses])
        self._advance_progress()
        counts = torch.tensor([len(s) - 1.0 for s in self._sequences], dtype=torch.float64)
        summed = torch.cat(losses.sums)
        return _SofteningBaseline(recorder.trace(), self._sequences, summed, counts), sampler

    def _sequence_losses(self) -> Float[Tensor, " sequences"]:
        """Return the summed loss of every sequence."""
        losses = [
            next_token_losses(_output_logits(forward(self._model, ids), ids), ids).sum(dim=1)
            for ids in stacked_batches(self._sequences, self._batch_size)
        ]
        self._advance_progress()
        return torch.cat(losses)

    def _output_gradients(self, layers: Sequence[LayerTrace]) -> dict[str, Tensor]:
        """Return the gradient of the summed loss in every block's output, at its near tokens."""
        samples = {x.name: self._sampler.near(x.name) for x in layers}
        near = {name: s.tokens.sort().values for name, s in samples.items() if s is not None}
        blocks = {name: self._sampler.block(name) for name in near}
        gradients: dict[str, list[Tensor]] = {name: [] for name in near}
        begin = 0
        for ids in stacked_batches(self._sequences, self._batch_size):
            with _gradient_probes(self._model, blocks) as probes:
                logits = _output_logits(forward(self._model, ids), ids)[:, :-1].flatten(0, 1)
                targets = ids[:, 1:].flatten().to(logits.device)
                nn.functional.cross_entropy(logits.float(), targets, reduction="sum").backward()
            for name, tokens in near.items():
                batch_tokens = tokens[(tokens >= begin) & (tokens < begin + ids.numel())] - begin
                probe = probes[name]
                assert probe.grad is not None
                rows = probe.grad.reshape(-1, probe.shape[-1])
                gradients[name].append(rows[batch_tokens.to(rows.device)].double().cpu())
            begin += ids.numel()
        self._advance_progress(3)
        return {name: torch.cat(chunks) for name, chunks in gradients.items()}

    def _soften_layer(
        self, layer: LayerTrace, gradients: dict[str, Tensor]
    ) -> tuple[SoftLayer, "_Prediction"]:
        """Soften one layer; return its record and its prediction by sequence."""
        gaps, form = layer.gap, "softmax" if layer.facts.k == 1 else "projection"
        band = gaps[gaps > 0].quantile(self._settings.first).item()
        width = band * MOMENTS["projection"][0] / MOMENTS[form][0]
        status, walls, prediction = self._prediction_status(layer), None, _Prediction()
        if status == "ok":
            walls = self._wall_tokens(layer, gradients[layer.name], form)
            prediction = _Prediction.of_layer(self._sample, walls, form)
        self._advance_progress()
        record = SoftLayer(
            name=layer.name,
            form=form,
            levels=self._soft_levels({layer.name: width}, width, prediction),
            predicted=_mean_per_predicted_token(prediction.slope, self._sample),
            density=gap_density(gaps),
            tail=margin_tail(gaps),
            status=status,
        )
        return (
            record if walls is None else self._add_wall_results(record, layer, walls)
        ), prediction

    def _add_wall_results(
        self, record: SoftLayer, layer: LayerTrace, walls: WallTokens
    ) -> SoftLayer:
        """Add the gradient part, the shell constant and the deciding tokens to a record."""
        first, curved = slope_parts(walls, record.form)
        sizes = (first + curved).abs()
        order = sizes.sort(descending=True).indices
        running = sizes[order].cumsum(0)
        half = int((running < running[-1] / 2).sum()) + 1 if float(running[-1]) > 0 else 0
        largest = order[:MAX_DECIDING_TOKENS].tolist()
        return replace(
            record,
            by_gradient=(first.sum() / self._sample.counts.sum()).item(),
            constant=shell_constant(record, layer, walls),
            near=len(walls.tokens),
            exact=len(walls.exact),
            deciding=tuple(self._deciding_token(layer, walls, i, record.form) for i in largest),
            half=half,
        )

    def _deciding_token(
        self, layer: LayerTrace, walls: WallTokens, index: int, form: str
    ) -> DecidingToken:
        """Return the record of a near token by its index."""
        trace, token, k = self._sample.trace, int(walls.tokens[index]), layer.facts.k
        first, second, _ = MOMENTS[form]
        effect = first * walls.first[index] + second * walls.bend[index]
        return DecidingToken(
            document=int(trace.documents[token]),
            position=int(trace.positions[token]),
            text=self._pieces[token] if token < len(self._pieces) else "",
            layer=layer.name,
            leaving=int(layer.experts[token, k - 1]),
            entering=int(layer.experts[token, k]),
            gap=walls.gaps[index].item(),
            effect=effect.item(),
        )

    def _prediction_status(self, layer: LayerTrace) -> str:
        """Return "ok" if the slope of a layer can be predicted, else the reason."""
        family = family_of(self._model.get_submodule(layer.name))
        if layer.facts.n_groups > 1:
            return "not answerable: ties between groups of experts are not swaps of two"
        if family is None or family.counts_columns:
            return "not answerable: the block of this family counts the slots of a token"
        if self._sampler.near(layer.name) is None:
            return self._sampler.status(layer.name)
        return "ok"

    def _wall_tokens(self, layer: LayerTrace, gradient: Tensor, form: str) -> WallTokens:
        """Measure jump and slope of the near tokens, and the exact change for some of them."""
        near = self._sampler.near(layer.name)
        assert near is not None
        router, block = self._model.get_submodule(layer.name), self._sampler.block(layer.name)
        # gradients are in the order of the tokens
        order = near.tokens.sort().indices
        tokens, rows = near.tokens[order], near.rows.at_tokens(order)
        with only_running(self._model):
            recorded = block.run(rows, recorded_choice(layer, tokens)).double().cpu()
            swapped = block.run(rows, swapped_choice(layer, tokens, router)).double().cpu()
        jump = swapped - recorded
        slope = (gradient * jump).sum(dim=1)
        source = torch.Generator().manual_seed(self._settings.seed)
        draw = torch.randperm(len(tokens), generator=source)
        exact = draw[: self._settings.exact].sort().values
        _, second, third = MOMENTS[form]
        share = third / second
        change = self._loss_changes(layer, tokens[exact], share)
        bend = torch.zeros_like(slope)
        bend[exact] = (change - share * slope[exact]) / share**2
        sizes = gradient.norm(dim=1), jump.norm(dim=1)
        return WallTokens(tokens, layer.gap[tokens], *sizes, slope, bend, exact)

    def _loss_changes(
        self, layer: LayerTrace, tokens: Int[Tensor, " exact"], share: float
    ) -> Float[Tensor, " exact"]:
        """Return ℓ(a), the change of the summed loss if a token's second expert has the share a."""
        sample = self._sample
        documents, positions = sample.trace.documents.long(), sample.trace.positions.long()
        router = self._model.get_submodule(layer.name)
        lengths = torch.tensor([len(sample.sequences[d]) for d in documents[tokens].tolist()])
        changes = torch.zeros(len(tokens), dtype=torch.float64)
        for length in lengths.unique().tolist():
            same = (lengths == length).nonzero().squeeze(1)
            for chunk in same.split(self._batch_size):
                chunk_tokens = tokens[chunk]
                ids = torch.stack([sample.sequences[d] for d in documents[chunk_tokens].tolist()])
                rows = torch.arange(len(chunk_tokens)) * length + positions[chunk_tokens]
                choice = interpolated_choice(layer, chunk_tokens, router, share)
                with (
                    only_running(self._model),
                    override_choice(router, choice_override(rows, choice)),
                ):
                    losses = next_token_losses(_output_logits(forward(self._model, ids), ids), ids)
                changes[chunk] = losses.sum(dim=1) - sample.losses[documents[chunk_tokens]]
        return changes

    def _soft_levels(
        self, widths: dict[str, float], unit: float, prediction: "_Prediction"
    ) -> tuple[SoftLevel, ...]:
        """Measure the loss at doubling widths, each compared with the prediction."""
        sample, levels = self._sample, []
        for factor in (2.0**level for level in range(self._settings.levels)):
            wider = {name: width * factor for name, width in widths.items()}
            with softened_routers(self._model, wider), only_running(self._model):
                loss_change = self._sequence_losses() - sample.losses
            width, change = factor * unit, clustered_ratio(loss_change, sample.counts)
            missed = expected = ratio = None
            if prediction.slope is not None:
                missed = clustered_ratio(prediction.slope - loss_change / width, sample.counts)
            if (
                prediction.change is not None
                and (expected_change := prediction.change(width)) is not None
            ):
                expected = clustered_ratio(expected_change / width, sample.counts)
                ratio = clustered_ratio(loss_change, expected_change)
            slope = change.times(1 / width)
            levels.append(SoftLevel(width, change, slope, missed, expected, ratio))
        return tuple(levels)


class _SequenceLossObserver(Observer):
    """Observer that records the summed loss of every sequence."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Record the summed losses of a batch by sequence."""
        logits = _checked_logits(outcome.logits, outcome.ids)
        self.sums.append(next_token_losses(logits, outcome.ids).sum(dim=1))


class _Prediction(NamedTuple):
    """Prediction by sequence: slope at width 0, and a function of the change at a width."""

    slope: Tensor | None = None
    change: Callable[[float], Tensor | None] | None = None

    @classmethod
    def of_layer(cls, sample: _SofteningBaseline, walls: WallTokens, form: str) -> "_Prediction":
        """Predict from the near tokens of one layer."""
        documents = sample.trace.documents[walls.tokens].long()

        def summed_by_sequence(terms: Tensor) -> Tensor:
            sums = torch.zeros(len(sample.counts), dtype=torch.float64)
            return sums.index_add_(0, documents, terms)

        def change(width: float) -> Tensor | None:
            terms = change_parts(walls, form, width)
            return None if terms is None else summed_by_sequence(terms)

        linear, curved = slope_parts(walls, form)
        return cls(summed_by_sequence(linear + curved), change)

    @classmethod
    def of_all(cls, layers: Sequence["_Prediction"], units: Sequence[float]) -> "_Prediction":
        """Predict all layers together as their sum (first order), widths in units of `units`."""
        pairs = list(zip(layers, units, strict=True))
        slope = _sum_or_none([None if x.slope is None else x.slope * unit for x, unit in pairs])
        if slope is None:
            return cls()

        def change(factor: float) -> Tensor | None:
            return _sum_or_none([x.change and x.change(factor * unit) for x, unit in pairs])

        return cls(slope, change)


def _sum_or_none(terms: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the terms; None if any term is None."""
    defined = [term for term in terms if term is not None]
    return torch.stack(defined).sum(dim=0) if len(defined) == len(terms) else None


def _mean_per_predicted_token(sums: Tensor | None, baseline: _SofteningBaseline) -> Estimate:
    """Return the mean per token, clustered by sequence; `NOT_PREDICTED` without sums."""
    return NOT_PREDICTED if sums is None else clustered_ratio(sums, baseline.counts)


@contextmanager
def _gradient_probes(model: nn.Module, blocks: dict[str, Block]) -> Iterator[dict[str, Tensor]]:
    """Context manager: evaluation mode with gradients only in zeros added to block outputs."""
    probes: dict[str, Tensor] = {}
    handles = []
    training = [module for module in model.modules() if module.training]
    graded = [p for p in model.parameters() if p.requires_grad]

    def probe_hook(name: str) -> Callable[..., Any]:
        def added(module: nn.Module, args: Any, output: Any) -> Any:
            states = output if isinstance(output, Tensor) else output[0]
            probes[name] = torch.zeros_like(states, requires_grad=True)
            probed_states = states + probes[name]
            return probed_states if isinstance(output, Tensor) else (probed_states, *output[1:])

        return added

    try:
        model.eval()
        for parameter in graded:
            parameter.requires_grad_(False)
        handles = [b.module.register_forward_hook(probe_hook(name)) for name, b in blocks.items()]
        with torch.enable_grad():
            yield probes
    finally:
        for handle in handles:
            handle.remove()
        for parameter in graded:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True


def _output_logits(output: Any, ids: Tensor) -> Float[Tensor, "rows length words"]:
    """Return the logits of a model's output, checked against its tokens."""
    return _checked_logits(getattr(output, "logits", None), ids)


def _checked_logits(logits: Any, ids: Tensor) -> Float[Tensor, "rows length words"]:
    """Return the logits; raises if they are missing or do not fit the tokens."""
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape:
        raise UnsupportedModelError("the model gives no logits for its tokens, so it has no loss")
    return logits
