"""Smoothing a model: routing without jumps at ties, what that repairs and what it costs.

    repair = smooth("org/model", budget=8.5)
    repair.metrics["factor@router bf16"]
    repair.smoothed.save_pretrained("smoothed")

ε is chosen on the first tokens of the text; both forms run on the same weights, on the tokens that
follow. Time is measured last, because the emulation of low precision only sees
the products of transformers' own experts.
"""

import copy
from contextlib import suppress
from typing import Any, NamedTuple, Unpack

from torch import Tensor, nn

from tieline.analysis.repair import (
    REPAIR_PERTURBATIONS,
    Latency,
    ModelForm,
    Repair,
    RepairTable,
    measure_repair,
    smoothing_latency,
)
from tieline.analysis.settings import SmoothOptions, SmoothSettings
from tieline.analysis.smooth_scores import measure_scores
from tieline.analysis.smooth_width import NOISE, SCALES, Calibration, chosen_scale
from tieline.core.errors import UnsupportedModelError
from tieline.core.settings import require_setting, takes_settings
from tieline.models.demo import DEMO
from tieline.models.kernel import KERNEL
from tieline.models.loading import can_use_experts, use_experts
from tieline.models.model import Model, ModelSource
from tieline.models.smooth import Smoothing, apply_smoothing, smooth_, unsmooth_, with_widths
from tieline.models.smooth_calibration import Measured
from tieline.models.spread import check_parallel
from tieline.models.stream_smoothing import StreamedModel
from tieline.run.condition import Perturbation
from tieline.run.corpus import Corpus
from tieline.run.processes import Ranks
from tieline.run.runner import Runner
from tieline.run.schedule import Progress


@takes_settings(SmoothSettings)
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
        _check_streamed(settings.experts_impl)
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
        calibration = self.calibrate(settings.noise or NOISE) if settings.by_law else None
        record = self.smoothing(calibration)
        table = self.table(record, calibration)
        smoothed, latency = self.smoothed(record, settings.rounds, settings.experts_impl)
        corpus, ranks = self.corpus, self.runner.ranks
        sizes = {"seed": corpus.seed, "batch_size": corpus.batch_size}
        return Repair(
            model=self.model.name or type(self.model.module).__name__,
            smoothing=record,
            repair=table,
            latency=latency,
            provenance={"text": corpus.origin, **sizes, **ranks.provenance()},
            smoothed=smoothed,
            tokenizer=self.model.tokenizer,
        )

    def measured(self, noise: str | None) -> Measured:
        """Scores and noise of the calibration text, which every process runs."""
        batches = self.corpus.stacked(self.split.calibration)
        return measure_scores(self.runner, batches, noise, self.progress)

    def calibrate(self, noise: str) -> Calibration:
        """What the calibration text says of the model."""
        return Calibration.of(self.model.module, self.measured(noise), noise)

    def smoothing(self, calibration: Calibration | None) -> Smoothing:
        """Choose ε as the settings say."""
        wish = self.settings
        if calibration is not None and wish.by_law:
            scale = self._scale(calibration)
            chosen = f"factor {wish.factor:g}" if wish.factor else f"KL {wish.max_moved:g}"
            how = f"{chosen} under {calibration.noise.name}: ε = {scale:.3g} times its noise"
            return self._record(epsilon=calibration.by_noise(scale), how=how)
        if wish.epsilon is not None:
            return self._record(epsilon=wish.epsilon)
        measured = self.measured(wish.noise)
        return self._record(budget=wish.budget, noise=wish.noise, measured=measured)

    def _record(self, **widths: Any) -> Smoothing:
        """How the model is smoothed with these widths; the model itself is left as it is."""
        record = smooth_(self.model.module, **widths, **self.settings.form)
        unsmooth_(self.model.module)  # all forms run on the same weights
        return record

    def _scale(self, calibration: Calibration) -> float:
        """The c = ε/σ that the settings ask for, by the calibration text."""
        wish = self.settings
        record = self._record(epsilon=calibration.by_noise(1.0))
        sequences = [sequence for sequence in self.split.calibration if len(sequence) > 1]
        ranks = Ranks.of(None, self.corpus.stacked(sequences))
        runner = Runner(self.model, ranks=ranks, memory=self.runner.memory)
        forms = [ModelForm(with_widths(record, calibration.by_noise(scale))) for scale in SCALES]
        tables = measure_repair(runner, forms, [calibration.noise], self.corpus.seed, self.progress)
        points = dict(zip(SCALES, tables, strict=True))
        return chosen_scale(points, factor=wish.factor, max_moved=wish.max_moved)

    def table(self, record: Smoothing, calibration: Calibration | None) -> RepairTable:
        """What the smoothed model repairs, on held-out text."""
        forms, seed = [ModelForm(record)], self.corpus.seed
        (table,) = measure_repair(self.runner, forms, _precisions(calibration), seed, self.progress)
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
        ids = self.corpus.stacked(self.split.measured)[0]
        return smoothed, _latencies(module, smoothed, ids, rounds, experts_impl)


def _precisions(calibration: Calibration | None) -> list[Perturbation]:
    """The default perturbations plus the one that is repaired."""
    repaired = [] if calibration is None else [calibration.noise]
    return list(dict.fromkeys([*REPAIR_PERTURBATIONS, *repaired]))


def _check_streamed(experts_impl: str | None) -> None:
    """Refuse a choice of experts to time, which needs the whole model in memory."""
    require_setting(
        experts_impl is None,
        "{experts_impl} needs the whole model in memory, and its weights are streamed",
    )


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


def _latencies(
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
