r"""Smoothing a model: routing without jumps at ties, what that repairs and what it costs.

    repair = smooth("org/model", budget=8.5)
    repair.metrics["factor@router bf16"]
    repair.smoothed.save_pretrained("smoothed")

ε is chosen on the first tokens of the text; both forms run on the same weights, on the tokens that
follow. Time is measured last, because the emulation of low precision only sees the products of
transformers' own experts.

    moved       KL of the smoothed model to the original, both in float32
    factor      flip part of the KL before / after, flip part = KL - the original's floor with
                clean routes

Widths are ε_l = c σ_l, σ_l the noise of layer l's gap under the precision that is to be repaired.
A factor or a largest KL is met by the c at which it holds on the calibration text; with
`near_original` every layer has the ε of `nearest_ramp`, by the noise that was measured.
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
from tieline.analysis.served_precision import recommend, served_rounding, tied_share
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
from tieline.measure.noise_flips import flip_reduction, nearest_ramp
from tieline.models.band_width import (
    Measured,
    Scores,
    budget_epsilon,
    refuse_equal_scores,
)
from tieline.models.demo import DEMO
from tieline.models.experts import KERNEL, can_use_experts, use_experts
from tieline.models.families import find_routers
from tieline.models.model import Model, ModelSource
from tieline.models.model_stream import StreamedModel
from tieline.models.parallel import check_parallel
from tieline.models.smoothed_model import Smoothing, apply_smoothing, smoothing_record, with_widths
from tieline.models.smoothed_router import GateName, LayerPlan, default_k_max, plan_layers
from tieline.routing.smooth_gates import group_projection, smooth_columns
from tieline.run.calibration import measure_scores, noise_perturbation
from tieline.run.condition import Condition, Perturbation
from tieline.run.corpus import Corpus
from tieline.run.plan import COSTS, announce_total, pass_cost
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, Runner, halves_batches

SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""c = ε/σ that a settings is sought among."""

NOISE = "router bf16"
"""The precision that is repaired unless another is named."""

LATENCY_TOKENS = 512
"""Most tokens of a pass that is timed."""

Widths = Mapping[str, float]


class SmoothingCalibration:
    """What is known of a model from its calibration text: scores and noise, layer by layer.

    Args:
        model: the original, in float32.
        measured: its scores and their noise.
        noise: the precision to repair.
    """

    def __init__(self, model: nn.Module, measured: Measured, noise: str) -> None:
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
        """Run these tokens, clean and under the noise."""
        measured = measure_scores(Runner(Model(model)), batches, noise, progress)
        return cls(model, measured, noise)

    def by_noise(self, scale: float) -> dict[str, float]:
        """ε_l = c σ_l."""
        return {name: scale * sigma for name, sigma in self.sigmas.items()}

    def experts(self, widths: Widths, gate: GateName) -> float:
        """Mean experts per token and layer at these widths, on the calibration text."""
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
        """The ε of each layer that gives it this mean number of experts."""
        widths = {}
        for plan in self.plans:
            measured = self.clean[plan.name]
            sizes = (plan.k, plan.n_experts, budget, measured.groups, gate)
            widths[plan.name] = budget_epsilon(measured.scores, *sizes)
        return widths


def _mean_used(share: Tensor) -> float:
    """Mean number of experts with a share."""
    return (share > 0).double().sum(dim=-1).mean().item()


def chosen_scale(
    points: Mapping[float, RepairTable], *, factor: float | None, max_moved: float | None
) -> float:
    """The c with this factor, or with this KL to the original, on a line between logarithms.

    The KL of a text is heavy-tailed, so the factor is that of the law, times the median over all
    points of what was measured over it.

    Args:
        points: tables of the calibration text by c, with one row, that of the noise.
        factor: how many times lower the flip part of the KL shall be.
        max_moved: KL to the original, nats per token.
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
    middle = ratios[len(ratios) // 2]
    return _scale_reaching(
        {c: middle * flip_reduction(c) for c in factors}, factor, "factor", "factor"
    )


def _scale_reaching(
    values: Mapping[float, float], target: float, setting: str, quantity: str
) -> float:
    """Where increasing values first reach the target that a setting gives."""
    name = f"{{{setting}}}"
    require_setting(
        0 < target < math.inf, name + " must be positive and finite, got {target:g}", target=target
    )
    scales = sorted(values)
    first, best = values[scales[0]], max(values.values())
    if target < first or target > best:
        side, end = ("least", first) if target < first else ("largest", best)
        raise SettingError(
            f"no ε between {scales[0]:g} and {scales[-1]:g} times the noise reaches {name} "
            f"{target:g}: the {side} {quantity} is {end:.3g}"
        )
    for low, high in itertools.pairwise(scales):
        below, above = values[low], values[high]
        if below <= target <= above:
            if not (0 < below < above < math.inf):
                return high
            share = math.log(target / below) / math.log(above / below)
            return low * (high / low) ** share
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

    Weights that are streamed are read once to choose ε and once to measure what it repairs, and
    once more for `factor` or `max_moved`. Time is then not measured, and the smoothed model is
    saved without a copy of the weights.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself. A named model is loaded in float32. With `parallel`, which is "data" alone, all
            processes must call, and all get the result.
        progress: called with stage, done and total while the work goes on.
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
        _check_experts(model.module, settings.experts_impl)
    ranks = Ranks.of(settings.parallel, corpus.stacked(split.measured))
    runner = Runner(model, ranks=ranks, memory=settings.memory)
    return _Smooth(runner, corpus, split, settings, progress).repair()


class _Smooth(NamedTuple):
    """A model that is being smoothed, and its text."""

    runner: Runner
    corpus: Corpus
    split: "TextSplit"
    settings: SmoothSettings
    progress: Progress | None

    @property
    def model(self) -> Model:
        """The original."""
        return self.runner.models[0]

    def repair(self) -> Repair:
        """Choose ε, measure what the smoothed model repairs, and smooth it."""
        settings = self.settings
        exact_ties = self.check_routers()
        announce_total(self.model, self.runner.ranks.batches, self.work(), self.progress)
        by_noise = settings.by_law or settings.near_original
        noise = settings.noise or NOISE
        calibration = None
        if by_noise:
            calibration = SmoothingCalibration(self.model.module, self.measured(noise), noise)
        record = self.smoothing(calibration)
        table = self.table(record, calibration)
        layers = len(find_routers(self.model.module))
        serving = original_serving(settings.serve, table, layers, exact_ties)
        smoothed, latency = self.smoothed(record, settings.rounds, settings.experts_impl)
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
            smoothed=smoothed,
            tokenizer=self.model.tokenizer,
        )

    def work(self) -> float:
        """Work of smoothing the model, in tokens of a clean pass (`run.plan`)."""
        settings, repaired = self.settings, noise_perturbation(self.settings.noise or NOISE)
        calibration = sum(map(len, self.split.calibration))
        noisy, smoothed = pass_cost(Condition(repaired)), COSTS["smoothed"]
        precisions = {*_precisions_compared(settings.serve, None)}
        work = calibration * (1 + noisy) + 4 * (settings.rounds + 2) * LATENCY_TOKENS
        if settings.near_original:
            precisions.add(repaired)
        if settings.by_law:
            precisions.add(repaired)
            work += calibration * (1 + len(SCALES) * (1 + 2 * noisy + 3 * smoothed))
        tokens = sum(ids.numel() for ids in self.runner.ranks.batches)
        for form, runs in ((0.0, 2.0), (smoothed, 1.5)):  # free and forced, of its form half
            costs = [pass_cost(Condition(precision)) + form for precision in precisions]
            perturbed = [runs * cost for cost in costs]
            work += tokens * (1 + form + sum(perturbed))
        return work

    def check_routers(self) -> float:
        """Refuse routers that choose all experts, or by scores that are all equal.

        Returns the largest share of a layer's tokens that tie exactly at the threshold, in a batch
        of the calibration text; 0 for a streamed model.
        """
        plans, _ = plan_layers(self.model.module, None)
        choosing = [plan for plan in plans if plan.k < plan.n_experts]
        require(
            bool(choosing) or not plans,
            "all experts are chosen: no tie is possible, and there is nothing to smooth",
            UnsupportedModelError,
        )
        if self.model.stream is not None:  # a read of all weights: its scores are looked at later
            return 0.0
        batch = self.corpus.stacked(self.split.calibration)[:1]
        clean = measure_scores(self.runner, batch, None).clean
        refuse_equal_scores(clean)
        return max((tied_share(clean[x.name].scores, x.k) for x in choosing), default=0.0)

    def measured(self, noise: str | None) -> Measured:
        """Scores and noise of the calibration text, which every process runs."""
        batches = self.corpus.stacked(self.split.calibration)
        measured = measure_scores(self.runner, batches, noise, self.progress)
        refuse_equal_scores(measured.clean)
        return measured

    def smoothing(self, calibration: SmoothingCalibration | None) -> Smoothing:
        """Choose ε as the settings say."""
        settings = self.settings
        if calibration is not None and settings.by_law:
            scale = self._scale(calibration)
            chosen = (
                f"factor {settings.factor:g}" if settings.factor else f"KL {settings.max_moved:g}"
            )
            how = f"{chosen} under {calibration.noise.name}: ε = {scale:.3g} times its noise"
            return self._record(epsilon=calibration.by_noise(scale), how=how)
        if calibration is not None:
            return self._nearest_smoothing(calibration)
        if settings.epsilon is not None:
            return self._record(epsilon=settings.epsilon)
        measured = self.measured(settings.noise)
        return self._record(budget=settings.budget, noise=settings.noise, calibration=measured)

    def _nearest_smoothing(self, calibration: SmoothingCalibration) -> Smoothing:
        """The widths at which the noisy smoothed model is nearest to the original."""
        noisy = {n: noise for n, noise in calibration.margin_noise.items() if noise.abs().any()}
        ramps = {name: nearest_ramp(noise) for name, noise in noisy.items()}
        widths = {plan.name: 0.0 for plan in calibration.plans}
        widths |= {name: ramp.epsilon for name, ramp in ramps.items()}
        scales = sorted(r.epsilon / calibration.sigmas[n] for n, r in ramps.items())
        gains, most = (
            [1 - getattr(ramp, field) for ramp in ramps.values()] for field in ("share", "least")
        )
        how = (
            f"nearest to the original under {calibration.noise.name}: ε = "
            f"{scales[len(scales) // 2]:.3g} times its noise; gains {_percents(gains)} of what "
            f"flips cost, of at most {_percents(most)} by any gate"
        )
        return self._record(epsilon=widths, how=how)

    def _record(self, **widths: Any) -> Smoothing:
        """How the model is smoothed with these widths."""
        return smoothing_record(self.model.module, **widths, **self.settings.form)

    def _scale(self, calibration: SmoothingCalibration) -> float:
        """The c = ε/σ that the settings ask for, by the calibration text."""
        settings = self.settings
        record = self._record(epsilon=calibration.by_noise(1.0))
        sequences = [sequence for sequence in self.split.calibration if len(sequence) > 1]
        ranks = Ranks.of(None, self.corpus.stacked(sequences))
        runner = Runner(self.model, ranks=ranks, memory=self.runner.memory)
        forms = [ModelForm(with_widths(record, calibration.by_noise(scale))) for scale in SCALES]
        tables = measure_repair(runner, forms, [calibration.noise], self.corpus.seed, self.progress)
        points = dict(zip(SCALES, tables, strict=True))
        return chosen_scale(points, factor=settings.factor, max_moved=settings.max_moved)

    def table(self, record: Smoothing, calibration: SmoothingCalibration | None) -> RepairTable:
        """What the smoothed model repairs, on held-out text."""
        forms, seed = [ModelForm(record)], self.corpus.seed
        precisions = _precisions_compared(self.settings.serve, calibration)
        (table,) = measure_repair(self.runner, forms, precisions, seed, self.progress)
        return table

    def smoothed(
        self, record: Smoothing, rounds: int, experts_impl: str | None
    ) -> tuple[Any, tuple[Latency, ...]]:
        """The smoothed model, and its time over that of the original where it is in memory."""
        module, stream = self.model.module, self.model.stream
        if stream is not None:
            apply_smoothing(module, record)
            return StreamedModel(stream), ()
        smoothed = copy.deepcopy(module)
        apply_smoothing(smoothed, record)
        ids = self.corpus.stacked(self.split.measured)[0][:, :LATENCY_TOKENS]
        ids = ids[: max(1, LATENCY_TOKENS // ids.shape[1])]
        return smoothed, _smoothing_latencies(module, smoothed, ids, rounds, experts_impl)


def _percents(shares: Sequence[float]) -> str:
    """The range of some shares in whole percent."""
    low, high = (round(100 * end(shares)) for end in (min, max))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _precisions_compared(
    serve: str, calibration: SmoothingCalibration | None
) -> list[Perturbation]:
    """Routers and model in the precision served, the next coarser one, and what is repaired."""
    order = list(SERVED)
    coarser = order[min(order.index(serve) + 1, len(order) - 1)]
    repaired = [] if calibration is None else [calibration.noise]
    routers = Perturbation("rounding", SERVED[serve])
    served = [routers, served_rounding(serve), served_rounding(coarser)]
    return list(dict.fromkeys([*served, *repaired]))


def _check_experts(model: nn.Module, experts_impl: str | None) -> None:
    """Refuse an implementation that cannot be set, before any work."""
    before = getattr(model.config, "_experts_implementation", None)
    use_experts(model, experts_impl)
    use_experts(model, before if experts_impl else None)


class TextSplit(NamedTuple):
    """Sequences of a text to choose ε on, and those to measure on."""

    calibration: list[Tensor]
    measured: list[Tensor]


def split_text(corpus: Corpus, model: Model, calibration: int) -> TextSplit:
    """Cut a text into sequences to choose ε on and others to measure on.

    Args:
        corpus: the text, with the number of tokens to measure on.
        model: the model that it is for.
        calibration: tokens before those, rounded up to whole sequences.
    """
    first, later = corpus.split(model.tokenizer, model.module, calibration)
    return TextSplit(first, [sequence for sequence in later if len(sequence) > 1])


def _smoothing_latencies(
    plain: Any, smoothed: Any, ids: Tensor, rounds: int, experts_impl: str | None
) -> tuple[Latency, ...]:
    """Time over the original's: with the experts asked for, or as they are and by our kernel."""
    for model in (plain, smoothed):
        use_experts(model, experts_impl)
    latencies = [smoothing_latency(plain, smoothed, ids, rounds)]
    if experts_impl is None and can_use_experts(smoothed):
        use_experts(smoothed, KERNEL)
        with suppress(UnsupportedModelError):  # experts of a layout that the kernel refuses
            latencies.append(smoothing_latency(plain, smoothed, ids, rounds))
        use_experts(smoothed, latencies[0].implementation)
    return tuple(latencies)
