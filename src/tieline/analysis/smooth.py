"""Smoothing a model: routing without jumps at ties, what that repairs and what it costs.

    repair = smooth("org/model", budget=8.5)
    repair.metrics["factor@router bf16"]
    repair.smoothed.save_pretrained("smoothed")

A copy is smoothed, with ε chosen on the first tokens of the text, and compared with the original
on the tokens that follow. Time is measured last, because the emulation of low precision only sees
the products of transformers' own experts.
"""

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from tieline.analysis.perturbations import Perturbation
from tieline.analysis.repair import (
    REPAIR_PERTURBATIONS,
    Latency,
    Repair,
    RepairTable,
    repair_table,
    repair_tables,
    smoothing_latency,
)
from tieline.analysis.smooth_width import NOISE, SCALES, Calibration, chosen_scale
from tieline.analysis.sources import ModelSource, as_model
from tieline.analysis.streamed_audit import check_room
from tieline.analysis.streamed_smooth import StreamedRepair
from tieline.core.errors import UnsupportedModelError, require
from tieline.models.demo import DEMO
from tieline.models.kernel import KERNEL
from tieline.models.loading import LoadedModel, can_use_experts, use_experts
from tieline.models.running import batches
from tieline.models.smooth import Smoothing, apply_smoothing, smooth_, unsmooth_
from tieline.models.smooth_router import GateName, plan_layers
from tieline.models.spread import check_parallel
from tieline.models.stream_smoothing import StreamedModel, stream_scores
from tieline.models.streaming import ModelStream
from tieline.run.corpus import Text, as_text, default_length, tokenise
from tieline.run.processes import Ranks

Progress = Callable[[str, int, int], None]


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
            what it repairs, instead of loaded; by default where they exceed the free memory. Time
            is then not measured, and the smoothed model is saved without a copy of the weights.
        memory: bytes of memory that a streamed model may take, by default what is free.
        keep: whether files that are fetched from the hub for a streamed model stay.
        parallel: how the processes of torchrun share the work: "data" alone (`hf.spread`); all must
            call, and all get the result.
        progress: called with stage, done and total while the work goes on.
    """
    _check_parallel(parallel)
    wish = _Wish(epsilon, budget, noise, factor, max_moved)
    wish.check()
    words, origin = as_text(text)
    options = {"device": device, "revision": revision, "trust_remote_code": trust_remote_code}
    options |= {"stream": stream, "memory": memory, "keep": keep, "copies": 2}
    options |= {"parallel": parallel}
    loaded = as_model(source, "smooth takes", dtype="fp32", **options)
    plain, parts = loaded.model, split_text(loaded, words, tokens, calibration)
    work = _Work(loaded, parts, batch_size, seed, parallel, progress)
    if loaded.stream is not None:
        _check_streamed(wish, experts_impl)
        check_room(loaded.stream, tokens, 2 * (1 + 2 * len(REPAIR_PERTURBATIONS)), memory)
        return work.streamed(loaded.stream, wish, _Form(gate, a, b, k_max), origin)
    _check_experts(plain, experts_impl)
    form = _Form(gate, a, b, k_max)
    share = Ranks.of(parallel, list(batches(parts.measured, batch_size)))
    smoothed, known = copy.deepcopy(plain), None
    if wish.by_law:
        known = work.calibrate(noise or NOISE)
    record = work.smooth(smoothed, wish, form, known)
    table = work.table(smoothed, known)
    ids = next(batches(work.parts.measured, batch_size))
    return Repair(
        model=loaded.name or type(plain).__name__,
        smoothing=record,
        repair=table,
        latency=_latencies(plain, smoothed, ids, rounds, experts_impl),
        provenance={"text": origin, "seed": seed, "batch_size": batch_size, **share.provenance()},
        smoothed=smoothed,
        tokenizer=loaded.tokenizer,
    )


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


class _Work(NamedTuple):
    """A model, its text, and how both are run."""

    loaded: LoadedModel
    parts: "TextSplit"
    batch_size: int
    seed: int
    parallel: str | None
    progress: Progress | None

    @property
    def _running(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "seed": self.seed, "progress": self.progress}

    @property
    def _shared(self) -> dict[str, Any]:
        """How held-out text is run; the calibration, which is short, is run by every process."""
        return self._running | {"parallel": self.parallel}

    def streamed(self, stream: ModelStream, wish: _Wish, form: _Form, origin: str) -> Repair:
        """Smooth a model that is streamed: a pass to choose ε, and one to measure."""
        model, ids = stream.model, list(batches(self.parts.calibration, self.batch_size))
        told = partial(self.progress or _silent, "streaming")
        plans = [plan for plan in plan_layers(model, None)[0] if plan.k < plan.n_experts]
        needed = wish.epsilon is None
        found = stream_scores(stream, plans, ids, wish.noise, told) if needed else None
        widths = {"epsilon": wish.epsilon, "budget": wish.budget, "noise": wish.noise}
        record = smooth_(model, **widths, measured=found, **form._asdict())
        unsmooth_(model)  # both forms run on the same weights
        measured = list(batches(self.parts.measured, self.batch_size))
        runs = StreamedRepair(stream, record, measured, REPAIR_PERTURBATIONS, self.seed)
        table = runs.table(told)
        return Repair(
            model=self.loaded.name or type(model).__name__,
            smoothing=apply_smoothing(model, record),
            repair=table,
            latency=(),
            provenance={"text": origin, "seed": self.seed, "batch_size": self.batch_size},
            smoothed=StreamedModel(stream),
            tokenizer=self.loaded.tokenizer,
        )

    def calibrate(self, noise: str) -> Calibration:
        """Scores and noise of the calibration text."""
        tokens = list(batches(self.parts.calibration, self.batch_size))
        return Calibration(self.loaded.model, tokens, noise, self.progress)

    def smooth(
        self, smoothed: nn.Module, wish: _Wish, form: _Form, known: Calibration | None
    ) -> Smoothing:
        """Smooth a copy of the model as the wish says."""
        if known is not None and wish.by_law:
            scale = self._scale(smoothed, wish, form, known)
            chosen = f"factor {wish.factor:g}" if wish.factor else f"KL {wish.max_moved:g}"
            how = f"{chosen} under {known.noise.name}: ε = {scale:.3g} times its noise"
            return smooth_(smoothed, epsilon=known.by_noise(scale), how=how, **form._asdict())
        return smooth_(
            smoothed,
            epsilon=wish.epsilon,
            budget=wish.budget,
            noise=wish.noise,
            calibration=list(batches(self.parts.calibration, self.batch_size)),
            progress=self.progress,
            **form._asdict(),
        )

    def _scale(self, smoothed: nn.Module, wish: _Wish, form: _Form, known: Calibration) -> float:
        """The c = ε/σ that the wish asks for, by the calibration text."""
        smooth_(smoothed, epsilon=known.by_noise(1.0), **form._asdict())
        tables = repair_tables(
            self.loaded.model,
            smoothed,
            [sequence for sequence in self.parts.calibration if len(sequence) > 1],
            [known.by_noise(scale) for scale in SCALES],
            perturbations=[known.noise],
            **self._running,
        )
        unsmooth_(smoothed)
        found = dict(zip(SCALES, tables, strict=True))
        return chosen_scale(found, factor=wish.factor, max_moved=wish.max_moved)

    def table(self, smoothed: nn.Module, known: Calibration | None) -> RepairTable:
        """What the smoothed model repairs, on held-out text."""
        sequences, precisions = self.parts.measured, _precisions(known)
        return repair_table(
            self.loaded.model, smoothed, sequences, perturbations=precisions, **self._shared
        )


def _precisions(known: Calibration | None) -> list[Perturbation]:
    """Those of every table, and the one that is repaired."""
    named = [] if known is None else [known.noise]
    return list(dict.fromkeys([*REPAIR_PERTURBATIONS, *named]))


def _silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def _check_streamed(wish: _Wish, experts_impl: str | None) -> None:
    """Refuse what needs the whole model in memory, of a model that is read layer by layer."""
    asked = {"factor": wish.factor, "max_moved": wish.max_moved, "experts_impl": experts_impl}
    named = [name for name, value in asked.items() if value is not None]
    require(
        not named,
        f"{' and '.join(named)} needs the whole model in memory, and its weights are streamed",
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


def split_text(loaded: LoadedModel, words: str, tokens: int, calibration: int) -> TextSplit:
    """Cut a text into sequences to choose ε on and others to measure on.

    Args:
        loaded: the model with its tokenizer.
        words: the text.
        tokens: tokens to measure on.
        calibration: tokens before those, rounded up to whole sequences.
    """
    length = min(default_length(loaded.model), calibration, tokens)
    found = tokenise(loaded.tokenizer, words, calibration + tokens, length)
    first = -(-calibration // length)
    require(
        len(found.sequences) > first,
        f"the text has {found.tokens} tokens: too few to choose ε on {calibration} of them and to "
        "measure on others",
    )
    measured = [sequence for sequence in found.sequences[first:] if len(sequence) > 1]
    return TextSplit(list(found.sequences[:first]), measured)


def _latencies(
    plain: Any, smoothed: Any, ids: Tensor, rounds: int, experts_impl: str | None
) -> tuple[Latency, ...]:
    """Time over the original's: with the experts asked for, or as they are and by our kernel."""
    for one in (plain, smoothed):
        use_experts(one, experts_impl)
    found = [smoothing_latency(plain, smoothed, ids, rounds)]
    if experts_impl is None and can_use_experts(smoothed):
        use_experts(smoothed, KERNEL)
        with suppress(UnsupportedModelError):  # experts of a layout that the kernel refuses
            found.append(smoothing_latency(plain, smoothed, ids, rounds))
        use_experts(smoothed, found[0].implementation)
    return tuple(found)
