r"""Smoothing a model: routing without jumps at ties, with its benefits and costs.

    repair = smooth("org/model", budget=8.5)
    repair.metrics["factor@router bf16"]
    repair.smoothed.save_pretrained("smoothed")

ε is chosen on the first tokens of the text; the original and the smoothed model are compared on the
tokens that follow, with the same weights. Time is measured last, because the emulation of low
precision only applies to the products of transformers' own experts.

    moved       KL of the smoothed model to the original, both in float32
    factor      flip part of the KL before / after, flip part = KL - the original's floor with
                clean routes

Widths are ε_l = c σ_l, σ_l the noise of layer l's gap under the precision to repair. The c of a
requested factor or KL is searched on the calibration text; with `near_original` every layer gets
the ε of `nearest_ramp` for its measured noise.
"""

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Unpack

from jaxtyping import Int
from torch import Tensor, nn

from tieline.analysis.job_settings import SERVED, SmoothOptions, SmoothSettings
from tieline.analysis.served_precision import recommend, served_rounding
from tieline.analysis.smooth_repair import (
    Latency,
    ModelForm,
    Repair,
    RepairTable,
    measure_repair,
    original_serving,
    smoothing_latency,
)
from tieline.core.errors import UnsupportedModelError, require
from tieline.core.setting_fields import SettingError, require_setting, takes_settings
from tieline.measure.exact_ties import tied_share
from tieline.measure.nearest_ramp import flip_reduction, nearest_ramp
from tieline.models.band_width import (
    CalibrationScores,
    Scores,
    budget_epsilon,
    refuse_equal_scores,
)
from tieline.models.demo import DEMO
from tieline.models.experts import KERNEL, can_use_experts, use_experts, using_experts
from tieline.models.families import find_routers
from tieline.models.model import Model, ModelSource
from tieline.models.model_stream import StreamedModel
from tieline.models.parallel import check_parallel
from tieline.models.smoothed_model import Smoothing, apply_smoothing, smoothing_record, with_widths
from tieline.models.smoothed_router import GateName, LayerPlan, default_k_max, plan_layers
from tieline.routing.smooth_gates import group_projection, smooth_columns
from tieline.run.batch_size import halves_batches
from tieline.run.calibration import measure_scores
from tieline.run.condition import Condition, Perturbation, noise_perturbation
from tieline.run.corpus import Corpus
from tieline.run.plan import COSTS, announce_total, pass_cost
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, Runner

SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Ratios c = ε/σ among which a requested factor or KL is searched."""

DEFAULT_NOISE = "router bf16"
"""The precision that is repaired by default."""

LATENCY_TOKENS = 512
"""Largest number of tokens of a timed pass."""

Widths = Mapping[str, float]


class SmoothingCalibration:
    """Scores and noise of a model's layers on a calibration text, and the widths they imply.

    Args:
        model: the original, in float32.
        measured: its scores and their noise.
        noise: the precision to repair.
    """

    def __init__(self, model: nn.Module, measured: CalibrationScores, noise: str) -> None:
        plans, _ = plan_layers(model, None)
        self.plans: list[LayerPlan] = [plan for plan in plans if plan.k < plan.n_experts]
        self.noise = noise_perturbation(noise)
        self.clean: Mapping[str, Scores] = measured.clean
        self.sigmas = dict(measured.sigmas)
        self.margin_noise = dict(measured.margin_noise)
        positive = any(sigma > 0 for sigma in self.sigmas.values())
        require(positive, f"{noise} does not change the scores of any router: nothing to repair")

    @classmethod
    def on_batches(
        cls,
        model: nn.Module,
        batches: Sequence[Int[Tensor, "rows length"]],
        noise: str,
        progress: Progress | None = None,
    ) -> "SmoothingCalibration":
        """Measure scores and noise by running these batches clean and under the noise."""
        measured = measure_scores(Runner(Model(model)), batches, noise, progress)
        return cls(model, measured, noise)

    def by_noise(self, scale: float) -> dict[str, float]:
        """Return the widths ε_l = c σ_l by layer name."""
        return {name: scale * sigma for name, sigma in self.sigmas.items()}

    def experts(self, widths: Widths, gate: GateName) -> float:
        """Return the mean number of experts per token and layer at these widths."""
        counts = []
        for plan in self.plans:
            measured, width = self.clean[plan.name], widths[plan.name]
            scores, k, groups = measured.scores.double(), plan.k, measured.groups
            if width <= 0:
                counts.append(float(k))
            elif gate == "projected":
                counts.append(_mean_used(group_projection(scores, k, width, groups)))
            else:
                band = {"epsilon": width, "k_max": default_k_max(k, plan.n_experts)}
                counts.append(_mean_used(smooth_columns(scores, k, groups=groups, **band).share))
        return sum(counts) / len(counts)

    def by_budget(self, budget: float, gate: GateName) -> dict[str, float]:
        """Return the widths that give each layer this mean number of experts, by layer name."""
        widths = {}
        for plan in self.plans:
            measured = self.clean[plan.name]
            sizes = (plan.k, plan.n_experts, budget, measured.groups, gate)
            widths[plan.name] = budget_epsilon(measured.scores, *sizes)
        return widths


def _mean_used(share: Tensor) -> float:
    """Return the mean number of experts with a positive share."""
    return (share > 0).double().sum(dim=-1).mean().item()


def chosen_scale(
    points: Mapping[float, RepairTable], *, factor: float | None, max_moved: float | None
) -> float:
    """Return the c with this factor or this KL to the original, interpolated between logarithms.

    The KL of a text is heavy-tailed, so the factor at c is predicted by `flip_reduction`, times the
    median over all points of the ratio of measured to predicted factor.

    Args:
        points: tables of the calibration text by c, each with one row, that of the noise.
        factor: target ratio of the flip part of the KL before and after.
        max_moved: target KL to the original, nats per token.
    """
    if max_moved is not None:
        moved = {c: table.moved.value or 0.0 for c, table in points.items()}
        return _scale_reaching(moved, max_moved, "max_moved", "KL to the original")
    assert factor is not None
    factors = {c: table.rows[0].flip_factor for c, table in points.items()}
    ratios = sorted(value / flip_reduction(c) for c, value in factors.items() if value and c >= 1)
    require_setting(
        bool(ratios), "no flips are left to be seen at any width: give {max_moved} instead"
    )
    median_ratio = ratios[len(ratios) // 2]
    predicted = {c: median_ratio * flip_reduction(c) for c in factors}
    return _scale_reaching(predicted, factor, "factor", "factor")


def _scale_reaching(
    values: Mapping[float, float], target: float, setting: str, quantity: str
) -> float:
    """Return the c at which increasing `values` by c first reach the target of a setting."""
    name = f"{{{setting}}}"
    require_setting(
        0 < target < math.inf, name + " must be positive and finite, got {target:g}", target=target
    )
    scales = sorted(values)
    first, largest = values[scales[0]], max(values.values())
    if target < first or target > largest:
        side, limit = ("least", first) if target < first else ("largest", largest)
        raise SettingError(
            f"no ε between {scales[0]:g} and {scales[-1]:g} times the noise reaches {name} "
            f"{target:g}: the {side} {quantity} is {limit:.3g}"
        )
    for low, high in itertools.pairwise(scales):
        below, above = values[low], values[high]
        if below <= target <= above:
            if not (0 < below < above < math.inf):
                return high
            fraction = math.log(target / below) / math.log(above / below)
            return low * (high / low) ** fraction
    return scales[0]


@takes_settings(SmoothSettings)
@halves_batches(SmoothSettings)
def smooth(
    source: ModelSource = DEMO,
    *,
    settings: SmoothSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[SmoothOptions],
) -> Repair:
    """Make a copy of a model whose routing is continuous at ties, and compare it with the original.

    Streamed weights are read once to choose ε, once to measure what it repairs, and once more for
    `factor` or `max_moved`. Time is then not measured, and the smoothed model is saved without a
    copy of the weights.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself. A named model is loaded in float32. With `parallel`, which must be "data", all
            processes must call it, and all get the result.
        progress: called with stage, done and total during the work.
    """
    settings = SmoothSettings.of(settings, options)
    check_parallel(settings.parallel)
    corpus = Corpus(**settings.corpus)
    model = Model.open(source, "smooth takes", dtype="fp32", copies=2, **settings.loading)
    split = split_text(corpus, model, settings.calibration)
    if model.stream is not None:
        require_setting(
            settings.experts_impl is None,
            "{experts_impl} needs the whole model in memory, and its weights are streamed",
        )
    else:
        with using_experts(model.module, settings.experts_impl):
            pass  # an implementation that cannot be set is refused before any work
    ranks = Ranks.share_batches(settings.parallel, corpus.stacked(split.measured))
    runner = Runner(model, ranks=ranks, memory=settings.memory)
    return _SmoothingJob(runner, corpus, split, settings, progress).run()


class _SmoothingJob(NamedTuple):
    """Smooths a model and measures it on a text."""

    runner: Runner
    corpus: Corpus
    split: "TextSplit"
    settings: SmoothSettings
    progress: Progress | None

    @property
    def model(self) -> Model:
        """The original model."""
        return self.runner.models[0]

    def run(self) -> Repair:
        """Choose ε, measure what the smoothed model repairs, and smooth it."""
        settings = self.settings
        exact_ties = self.check_routers()
        announce_total(self.model, self.runner.ranks.batches, self.total_work(), self.progress)
        noise = settings.noise or DEFAULT_NOISE
        calibration = None
        if settings.searches_scale or settings.near_original:
            measured = self.measure_calibration(noise)
            calibration = SmoothingCalibration(self.model.module, measured, noise)
        record = self.choose_smoothing(calibration)
        table = self.measure_table(record, calibration)
        layers = len(find_routers(self.model.module))
        serving = original_serving(settings.serve, table, layers, exact_ties)
        smoothed, latency = self.smooth_model(record, settings.rounds, settings.experts_impl)
        corpus, ranks = self.corpus, self.runner.ranks
        sizes = {"seed": corpus.seed, "batch_size": corpus.batch_size}
        return Repair(
            model=self.model.name or type(self.model.module).__name__,
            smoothing=record,
            repair=table,
            latency=latency,
            serving=serving,
            recommendation=recommend(serving),
            provenance={"text": corpus.origin, **sizes, **ranks.provenance()},
            near_original=noise_perturbation(noise).name if settings.near_original else None,
            smoothed=smoothed,
            tokenizer=self.model.tokenizer,
        )

    def total_work(self) -> float:
        """Return the work of smoothing the model, in tokens of a clean pass (`run.plan`)."""
        settings, repaired = self.settings, noise_perturbation(self.settings.noise or DEFAULT_NOISE)
        calibration = sum(map(len, self.split.calibration))
        noisy, smoothed = pass_cost(Condition(repaired)), COSTS["smoothed"]
        precisions = {*_compared_precisions(settings.serve, None)}
        work = calibration * (1 + noisy) + 4 * (settings.rounds + 2) * LATENCY_TOKENS
        if settings.near_original:
            precisions.add(repaired)
        if settings.searches_scale:
            precisions.add(repaired)
            work += calibration * (1 + len(SCALES) * (1 + 2 * noisy + 3 * smoothed))
        tokens = sum(ids.numel() for ids in self.runner.ranks.batches)
        for extra_cost, runs in ((0.0, 2.0), (smoothed, 1.5)):  # forced on half when smoothed
            costs = [pass_cost(Condition(precision)) + extra_cost for precision in precisions]
            work += tokens * (1 + extra_cost + sum(runs * cost for cost in costs))
        return work

    def check_routers(self) -> float:
        """Refuse routers that choose all experts or have equal scores; return the share of ties.

        This is the largest share of a layer's tokens that tie exactly at the threshold, in a batch
        of the calibration text; 0 for a streamed model.
        """
        plans, _ = plan_layers(self.model.module, None)
        choosing = [plan for plan in plans if plan.k < plan.n_experts]
        require(
            bool(choosing) or not plans,
            "all experts are chosen: no tie is possible, and there is nothing to smooth",
            UnsupportedModelError,
        )
        if self.model.stream is not None:  # reading all weights; scores are checked later instead
            return 0.0
        batch = self.corpus.stacked(self.split.calibration)[:1]
        clean = measure_scores(self.runner, batch, None).clean
        refuse_equal_scores(clean)
        return max((tied_share(clean[x.name].scores, x.k) for x in choosing), default=0.0)

    def measure_calibration(self, noise: str | None) -> CalibrationScores:
        """Measure scores and noise on the calibration text, which every process runs."""
        batches = self.corpus.stacked(self.split.calibration)
        measured = measure_scores(self.runner, batches, noise, self.progress)
        refuse_equal_scores(measured.clean)
        return measured

    def choose_smoothing(self, calibration: SmoothingCalibration | None) -> Smoothing:
        """Choose ε as the settings ask for."""
        settings = self.settings
        if calibration is not None and settings.searches_scale:
            scale = self._search_scale(calibration)
            target = (
                f"factor {settings.factor:g}" if settings.factor else f"KL {settings.max_moved:g}"
            )
            how = f"{target} under {calibration.noise.name}: ε = {scale:.3g} times its noise"
            return self._record(epsilon=calibration.by_noise(scale), how=how)
        if calibration is not None:
            return self._nearest_smoothing(calibration)
        if settings.epsilon is not None:
            return self._record(epsilon=settings.epsilon)
        measured = self.measure_calibration(settings.noise)
        return self._record(budget=settings.budget, noise=settings.noise, calibration=measured)

    def _nearest_smoothing(self, calibration: SmoothingCalibration) -> Smoothing:
        """Choose the widths at which the noisy smoothed model is nearest to the original."""
        noisy = {n: noise for n, noise in calibration.margin_noise.items() if noise.abs().any()}
        ramps = {name: nearest_ramp(noise) for name, noise in noisy.items()}
        widths = {plan.name: 0.0 for plan in calibration.plans}
        widths |= {name: ramp.epsilon for name, ramp in ramps.items()}
        scales = sorted(r.epsilon / calibration.sigmas[n] for n, r in ramps.items())
        gains = _percent_range([1 - ramp.share for ramp in ramps.values()])
        possible_gains = _percent_range([1 - ramp.least for ramp in ramps.values()])
        how = (
            f"nearest to the original under {calibration.noise.name}: ε = "
            f"{scales[len(scales) // 2]:.3g} times its noise; by the noise alone it gains "
            f"{gains} of what flips cost, of at most {possible_gains} by any gate"
        )
        return self._record(epsilon=widths, how=how)

    def _record(self, **widths: Any) -> Smoothing:
        """Return the record of smoothing the model with these widths and the settings' gate."""
        return smoothing_record(self.model.module, **widths, **self.settings.gate_options)

    def _search_scale(self, calibration: SmoothingCalibration) -> float:
        """Search the c = ε/σ with the requested factor or KL on the calibration text."""
        settings = self.settings
        record = self._record(epsilon=calibration.by_noise(1.0))
        sequences = [sequence for sequence in self.split.calibration if len(sequence) > 1]
        ranks = Ranks.share_batches(None, self.corpus.stacked(sequences))
        runner = Runner(self.model, ranks=ranks, memory=self.runner.memory)
        forms = [ModelForm(with_widths(record, calibration.by_noise(scale))) for scale in SCALES]
        tables = measure_repair(runner, forms, [calibration.noise], self.corpus.seed, self.progress)
        points = dict(zip(SCALES, tables, strict=True))
        return chosen_scale(points, factor=settings.factor, max_moved=settings.max_moved)

    def measure_table(
        self, record: Smoothing, calibration: SmoothingCalibration | None
    ) -> RepairTable:
        """Measure what the smoothed model repairs on held-out text."""
        forms, seed = [ModelForm(record)], self.corpus.seed
        precisions = _compared_precisions(self.settings.serve, calibration)
        (table,) = measure_repair(self.runner, forms, precisions, seed, self.progress)
        return table

    def smooth_model(
        self, record: Smoothing, rounds: int, experts_impl: str | None
    ) -> tuple[Any, tuple[Latency, ...]]:
        """Return the smoothed model, and its relative time if the model is in memory."""
        module, stream = self.model.module, self.model.stream
        if stream is not None:
            apply_smoothing(module, record)
            return StreamedModel(stream), ()
        smoothed = copy.deepcopy(module)
        apply_smoothing(smoothed, record)
        ids = self.corpus.stacked(self.split.measured)[0][:, :LATENCY_TOKENS]
        ids = ids[: max(1, LATENCY_TOKENS // ids.shape[1])]
        return smoothed, _smoothing_latencies(module, smoothed, ids, rounds, experts_impl)


def _percent_range(shares: Sequence[float]) -> str:
    """Return the range of some shares in whole percent."""
    low, high = round(100 * min(shares)), round(100 * max(shares))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _compared_precisions(
    serve: str, calibration: SmoothingCalibration | None
) -> list[Perturbation]:
    """Return the precision served in routers and model, the next coarser one and the repaired."""
    precisions = list(SERVED)
    coarser = precisions[min(precisions.index(serve) + 1, len(precisions) - 1)]
    repaired = [] if calibration is None else [calibration.noise]
    routers = Perturbation("rounding", SERVED[serve])
    served = [routers, served_rounding(serve), served_rounding(coarser)]
    return list(dict.fromkeys([*served, *repaired]))


class TextSplit(NamedTuple):
    """Sequences of a text to choose ε on, and others to measure on."""

    calibration: list[Tensor]
    measured: list[Tensor]


def split_text(corpus: Corpus, model: Model, calibration: int) -> TextSplit:
    """Cut a text into sequences to choose ε on and others to measure on.

    Args:
        corpus: the text, with the number of tokens to measure on.
        model: the model that it is for.
        calibration: number of tokens before these, rounded up to whole sequences.
    """
    first, later = corpus.split(model.tokenizer, model.module, calibration)
    return TextSplit(first, [sequence for sequence in later if len(sequence) > 1])


def _smoothing_latencies(
    plain: Any, smoothed: Any, ids: Tensor, rounds: int, experts_impl: str | None
) -> tuple[Latency, ...]:
    """Measure the relative time with the requested experts, or with default ones and our kernel."""
    for model in (plain, smoothed):
        use_experts(model, experts_impl)
    latencies = [smoothing_latency(plain, smoothed, ids, rounds)]
    if experts_impl is None and can_use_experts(smoothed):
        use_experts(smoothed, KERNEL)
        with suppress(UnsupportedModelError):  # experts of a layout that the kernel refuses
            latencies.append(smoothing_latency(plain, smoothed, ids, rounds))
        use_experts(smoothed, latencies[0].implementation)
    return tuple(latencies)
