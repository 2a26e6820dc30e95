"""Smoothing a model: routing without jumps at ties, what that repairs and what it costs.

    repair = smooth("org/model", budget=8.5)
    repair.metrics["factor@router bf16"]
    repair.smoothed.save_pretrained("smoothed")

ε is chosen on the first tokens of the text; both forms run on the same weights, on the tokens that
follow. Time is measured last, because the emulation of low precision only sees
the products of transformers' own experts.
"""

import copy
import math
from contextlib import suppress
from typing import Any, NamedTuple

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
from tieline.analysis.smooth_scores import measure_scores
from tieline.analysis.smooth_width import NOISE, SCALES, Calibration, chosen_scale
from tieline.core.errors import UnsupportedModelError, require
from tieline.models.demo import DEMO
from tieline.models.kernel import KERNEL
from tieline.models.loading import can_use_experts, use_experts
from tieline.models.model import Model, ModelSource
from tieline.models.smooth import Smoothing, apply_smoothing, smooth_, unsmooth_, with_widths
from tieline.models.smooth_calibration import Measured
from tieline.models.smooth_router import GateName
from tieline.models.spread import check_parallel
from tieline.models.stream_smoothing import StreamedModel
from tieline.run.condition import Perturbation
from tieline.run.corpus import Corpus, Text
from tieline.run.processes import Ranks
from tieline.run.runner import Runner
from tieline.run.schedule import Progress


def smooth(
    source: ModelSource = DEMO,
    *,
    budget: float | None = None,
    noise: str | None = None,
    epsilon: float | None = None,
    factor: float | None = None,
    max_moved: float | None = None,
    gate: GateName | None = None,
    a: float = 1.0,
    b: float = 1.0,
    k_max: int | None = None,
    text: Text = None,
    tokens: int = 16384,
    calibration: int = 4096,
    batch_size: int = 8,
    rounds: int = 12,
    experts_impl: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    stream: bool | None = None,
    memory: int | None = None,
    keep: bool = True,
    parallel: str | None = None,
    progress: Progress | None = None,
) -> Repair:
    """Make a copy of a model whose routing is continuous at ties, and compare it with the original.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        budget: mean experts per token, above k; by default k + 0.5.
        noise: make the ramp wide against this precision instead: "bf16", "int8", "router bf16".
            With `factor` or `max_moved`: the one to repair, by default "router bf16".
        epsilon: width of the band in units of the scores, for all layers, instead of both.
        factor: make the part of the KL that flips cause under `noise` this many times lower.
        max_moved: stay within this KL of the original, nats per token.
        gate: "projected": tied experts share a seat; "ramp": experts below the threshold are
            added. By default "projected", but "ramp" where a, b or k_max are given.
        a: exponent at the lower end of the ramp.
        b: exponent at its upper end: 1 is straight, 50 the paper's.
        k_max: slots per token of the ramp; by default k + max(2, k/2).
        text: what to run: a str, the Path of a file, or None for the text in the box.
        tokens: tokens to measure on.
        calibration: tokens before those, to choose ε on.
        batch_size: sequences per forward pass.
        rounds: rounds to measure time in.
        experts_impl: experts to measure time with: "tieline", "grouped_mm", "eager", ...; by
            default those of the model, and "tieline" for the smoothed one.
        seed: seed of all noise.
        device: where to load a named model, in float32.
        revision: its branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with it may run.
        stream: whether its weights are read layer by layer, once to choose ε and once to measure
            what it repairs (and once more for `factor` or `max_moved`), instead of loaded; by
            default where they exceed the free memory. Time
            is then not measured, and the smoothed model is saved without a copy of the weights.
        memory: bytes of memory that a streamed model may take, by default what is free.
        keep: whether files that are fetched from the hub for a streamed model stay.
        parallel: how the processes of torchrun share the work: "data" alone (`models.spread`); all
            must call, and all get the result.
        progress: called with stage, done and total while the work goes on.
    """
    _check_parallel(parallel)
    wish = _Wish(epsilon, budget, noise, factor, max_moved)
    wish.check()
    corpus = Corpus(text, tokens, None, batch_size, seed)
    loading = {"device": device, "revision": revision, "trust_remote_code": trust_remote_code}
    loading |= {"stream": stream, "memory": memory, "keep": keep, "copies": 2}
    model = Model.open(source, "smooth takes", dtype="fp32", parallel=parallel, **loading)
    split = split_text(corpus, model, calibration)
    if model.stream is not None:
        _check_streamed(experts_impl)
    else:
        _check_experts(model.module, experts_impl)
    ranks = Ranks.of(parallel, corpus.stacked(split.measured))
    runner = Runner(model, ranks=ranks, memory=memory)
    work = _Smooth(runner, corpus, split, _Form(gate, a, b, k_max), progress)
    return work.repair(wish, rounds, experts_impl)


def _check_parallel(parallel: str | None) -> None:
    """Refuse models in parts: the smoothed one is a copy, saved whole by one process."""
    check_parallel(parallel)
    require(
        parallel in (None, "data"),
        f"parallel {parallel!r}: smoothing compares a whole model with a whole copy of it, which "
        "one process saves: take data",
    )


class _Wish(NamedTuple):
    """How ε is to be chosen."""

    epsilon: float | None
    budget: float | None
    noise: str | None
    factor: float | None
    max_moved: float | None

    @property
    def by_law(self) -> bool:
        """Whether ε follows from what it repairs or moves."""
        return self.factor is not None or self.max_moved is not None

    def check(self) -> None:
        """Refuse wishes that contradict each other."""
        alone = self.epsilon is None or (self.budget is self.noise is None and not self.by_law)
        require(alone, "epsilon goes with no other choice of ε: leave out budget and noise")
        given = {"factor": self.factor, "max_moved": self.max_moved, "budget": self.budget}
        names = [name for name, value in given.items() if value is not None]
        require(
            len(names) <= 1 or not self.by_law,
            f"{' and '.join(names)} each choose ε: give one of them",
        )
        width = self.epsilon is None or 0 < self.epsilon < math.inf
        require(width, f"epsilon is the width of a band: positive and finite, got {self.epsilon}")
        moved = self.max_moved is None or 0 < self.max_moved < math.inf
        require(moved, f"max_moved is a KL: positive and finite, got {self.max_moved}")
        least = self.factor is None or 1 < self.factor < math.inf
        require(least, f"factor is above 1 and finite, got {self.factor}")


class _Form(NamedTuple):
    """The gate and its ramp."""

    gate: GateName | None
    a: float
    b: float
    k_max: int | None


class _Smooth(NamedTuple):
    """A model that is being smoothed, and its text."""

    runner: Runner
    corpus: Corpus
    split: "TextSplit"
    form: _Form
    progress: Progress | None

    @property
    def model(self) -> Model:
        """The original."""
        return self.runner.models[0]

    def repair(self, wish: _Wish, rounds: int, experts_impl: str | None) -> Repair:
        """Choose ε, measure what the smoothed model repairs, and smooth it."""
        known = self.calibrate(wish.noise or NOISE) if wish.by_law else None
        record = self.smoothing(wish, known)
        table = self.table(record, known)
        smoothed, latency = self.smoothed(record, rounds, experts_impl)
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

    def smoothing(self, wish: _Wish, known: Calibration | None) -> Smoothing:
        """Choose ε as the wish says."""
        if known is not None and wish.by_law:
            scale = self._scale(wish, known)
            chosen = f"factor {wish.factor:g}" if wish.factor else f"KL {wish.max_moved:g}"
            how = f"{chosen} under {known.noise.name}: ε = {scale:.3g} times its noise"
            return self._record(epsilon=known.by_noise(scale), how=how)
        if wish.epsilon is not None:
            return self._record(epsilon=wish.epsilon)
        measured = self.measured(wish.noise)
        return self._record(budget=wish.budget, noise=wish.noise, measured=measured)

    def _record(self, **widths: Any) -> Smoothing:
        """How the model is smoothed with these widths; the model itself is left as it is."""
        record = smooth_(self.model.module, **widths, **self.form._asdict())
        unsmooth_(self.model.module)  # all forms run on the same weights
        return record

    def _scale(self, wish: _Wish, known: Calibration) -> float:
        """The c = ε/σ that the wish asks for, by the calibration text."""
        record = self._record(epsilon=known.by_noise(1.0))
        sequences = [sequence for sequence in self.split.calibration if len(sequence) > 1]
        ranks = Ranks.of(None, self.corpus.stacked(sequences))
        runner = Runner(self.model, ranks=ranks, memory=self.runner.memory)
        forms = [ModelForm(with_widths(record, known.by_noise(scale))) for scale in SCALES]
        tables = measure_repair(runner, forms, [known.noise], self.corpus.seed, self.progress)
        points = dict(zip(SCALES, tables, strict=True))
        return chosen_scale(points, factor=wish.factor, max_moved=wish.max_moved)

    def table(self, record: Smoothing, known: Calibration | None) -> RepairTable:
        """What the smoothed model repairs, on held-out text."""
        forms, seed = [ModelForm(record)], self.corpus.seed
        (table,) = measure_repair(self.runner, forms, _precisions(known), seed, self.progress)
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


def _precisions(known: Calibration | None) -> list[Perturbation]:
    """The default perturbations plus the one that is repaired."""
    repaired = [] if known is None else [known.noise]
    return list(dict.fromkeys([*REPAIR_PERTURBATIONS, *repaired]))


def _check_streamed(experts_impl: str | None) -> None:
    """Refuse a choice of experts to time, which needs the whole model in memory."""
    require(
        experts_impl is None,
        "experts_impl needs the whole model in memory, and its weights are streamed",
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
