"""Inspecting a model: what its routing looks like on a text, in one call.

    report = inspect("allenai/OLMoE-1B-7B-0924")
    report.verdict, report.metrics["flip@bf16"], report.trace

The text is cut into sequences without padding and run in evaluation mode without gradients; gaps,
ties, flips and load are measured on the trace, jumps by swapping tied experts in the model. A
saved trace or summary is measured without a model, so its jumps stay unmeasured.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
import transformers
from torch import nn

from tieline._version import __version__
from tieline.analysis.calibration import most_first, tokens_needed
from tieline.analysis.findings import judge, metrics, observe
from tieline.analysis.inspection import Inspection, LayerJumps, NoiseReport, TextSample
from tieline.analysis.jump import JumpSettings, with_losses
from tieline.analysis.layer_measurer import LayerMeasurer
from tieline.analysis.own_noise import own_noise
from tieline.analysis.settings import InspectOptions, InspectSettings
from tieline.analysis.sources import ModelSource, as_model, load, source_kind
from tieline.analysis.swap import BlockSampler, block_of
from tieline.analysis.text import text_sample
from tieline.core.errors import ParameterError, require
from tieline.core.numerics import one_thread
from tieline.core.records import to_plain
from tieline.core.settings import takes_settings
from tieline.measure.measure_records import MeasureSettings
from tieline.measure.measures import RoutingMeasures, measure, measure_summary
from tieline.models.capture import DEFAULT_EPSILONS, ObserverSettings
from tieline.models.demo import DEMO
from tieline.models.families import chosen_routers, family_of, find_routers
from tieline.models.model import Model
from tieline.models.running import batches, only_running, text_config
from tieline.run.corpus import TokenisedText, as_text, default_length, tokenise
from tieline.run.observers import Observer
from tieline.run.processes import Ranks
from tieline.run.recorder import RouteRecorder, clean_plan
from tieline.run.resume import RunState
from tieline.run.runner import Runner
from tieline.trace.record import RoutingTrace
from tieline.trace.summary import RoutingSummary

Progress = Callable[[str, int, int], None]
"""Called with the stage ("forward", "jumps", "losses", "noise"), what is done, and of how much."""

MOST_BYTES = 1 << 30
"""Largest size of the router inputs that are kept in memory during the measurement."""

NO_MODEL = "not measured: jumps need the model"
NO_NOISE = "not measured: the noise of the model was not asked for"
STREAMED_NOISE = "not measured: weights that are streamed cannot be rounded"


@takes_settings(InspectSettings)
def inspect(
    source: ModelSource | RoutingTrace | RoutingSummary = DEMO,
    *,
    settings: InspectSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[InspectOptions],
) -> Inspection:
    """Measure how near a model's tokens are to a routing tie, in which layers, and what flips cost.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, `(model, tokenizer)`; or a
            trace, a summary or the folder of one, of which `measure_settings` and `expert_tokens`
            count.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself. Losses take 2 forward passes of a sequence for each of
            `jump_settings.loss_swaps` (by default 32) tokens per layer, noise two passes of 2,048
            tokens at most. With `parallel`, all processes must call, and all get the result.
        progress: called with stage, done and total while the work goes on.
    """
    settings = InspectSettings.of(settings, options)
    expert_tokens, measuring = settings.expert_tokens, settings.measure_settings
    routed = _saved_routing(source)
    if routed is not None:
        return _inspect_saved(routed, measuring, expert_tokens)
    text, origin = as_text(settings.text)
    batch_size, seed, parallel = settings.batch_size, settings.seed, settings.parallel
    loaded = as_model(
        source,
        "inspect takes a trace or summary, or",
        dtype=settings.dtype,
        **settings.loading,
    )
    model, clock = loaded.model, _Clock()
    names = router_names(model, settings.layers)
    with clock("tokenise"):
        length = settings.sequence_length or default_length(model)
        tokenised = tokenise(loaded.tokenizer, text, settings.tokens, length)
    ranks = Ranks.of(parallel, list(batches(tokenised.sequences, batch_size)))
    facts = _facts(tokenised, origin, batch_size, seed) | ranks.provenance()
    inspector = _Inspector(
        Model(*loaded), names, tokenised, ranks, batch_size, facts, clock, progress or _silent
    )
    trace, measures, layer_jumps = inspector.measure(settings)
    model_noise = inspector.noise(settings.noise and parallel in (None, "data"))
    facts = dict(trace.provenance) | ({"model": loaded.name} if loaded.name else {})
    sample, timings = text_sample(trace, tokenised), clock.timings(trace.n_tokens)
    result = _inspection(measures, layer_jumps, sample, facts, timings, trace, expert_tokens)
    return replace(result, noise=model_noise)


Measured = tuple[RoutingTrace, RoutingMeasures, tuple[LayerJumps, ...]]
"""The routing of a text, its measures and the jumps of every layer."""


@dataclass(frozen=True)
class _Inspector:
    """A model under inspection, its text, and how it is run.

    Attributes:
        model: the model, in memory or streamed.
        names: routers to look at.
        text: the text in sequences.
        ranks: its batches, and how processes share them.
        batch_size: sequences per forward pass.
        facts: what the bits of the result depend on beside the model.
        clock: takes the time of each stage.
        progress: called with stage, done and total.
    """

    model: Model
    names: tuple[str, ...]
    text: TokenisedText
    ranks: Ranks
    batch_size: int
    facts: dict[str, object]
    clock: "_Clock"
    progress: Progress

    def measure(self, settings: InspectSettings) -> Measured:
        """Run the text once, and measure its layers: from disk while their weights are there."""
        plan = _plan(settings.jump_settings, settings.seed, settings.loss_jumps)
        measuring = settings.measure_settings or MeasureSettings()
        streamed, losses = self.model.stream is not None, settings.loss_jumps and settings.jumps
        require(
            not (settings.loss_jumps and streamed),
            "what flips do to the loss needs the model in memory: no loss_jumps",
        )
        recorder = RouteRecorder(self.model.module, self._recorded(streamed), self.names)
        sampler = self._sampler(recorder, plan) if settings.jumps else None
        measurer = LayerMeasurer(self.model.module, recorder, measuring, sampler, plan)
        observers = [recorder, measurer] if sampler is None else [recorder, sampler, measurer]
        with self.clock("forward"):
            state = self._state([measuring, plan], observers, settings.resume)
            runner = Runner(self.model, ranks=self.ranks)
            batches_run = clean_plan("forward", self.ranks.numbered)
            runner.run(batches_run, observers, self.progress, resume=state)
            if state is not None:
                state.clear()
        trace = recorder.trace()
        trace = replace(trace, provenance={**trace.provenance, **self.facts})
        with self.clock("measure"):
            measures = measurer.measures(trace, self.ranks)
        with self.clock("jumps"):
            layer_jumps = measurer.jumps(trace, self.ranks, partial(self.progress, "jumps"))
            if losses:
                layer_jumps = self._with_losses(trace, layer_jumps, plan.loss_swaps)
        layers = tuple(replace(layer, inputs=None) for layer in trace.layers)
        return replace(trace, layers=layers), measures, layer_jumps

    def _recorded(self, streamed: bool) -> ObserverSettings:
        """What is recorded; the inputs of one layer at a time are held where weights are read."""
        held = self.names[:1] if streamed else self.names
        inputs = inputs_fit(self.model.module, held, self.text.tokens)
        return ObserverSettings(4, DEFAULT_EPSILONS, inputs, True)

    def _sampler(self, recorder: RouteRecorder, plan: JumpSettings) -> BlockSampler:
        blocks = {name: block_of(self.model.module, name) for name in self.names}
        sizes = (plan.near, plan.random, plan.seed, self.ranks.tokens)
        return BlockSampler(blocks, recorder, *sizes)

    def _state(
        self, settings: list[Any], observers: Sequence[Observer], resume: bool
    ) -> RunState | None:
        """Resume state, keyed by a digest of everything the numbers depend on; None in memory."""
        stream = self.model.stream
        if stream is None:
            return None
        groups = {unit: group.count for unit, group in stream.groups.items()}
        versions = [__version__, torch.__version__, transformers.__version__]
        config = json.loads(stream.model.config.to_json_string())
        kinds = [type(observer).__name__ for observer in observers]
        plain = [to_plain(settings), groups, versions, config, kinds, list(self.names)]
        facts = {"run": self.facts, "settings": plain, "dtype": str(stream.model.dtype)}
        return RunState(facts, stream.weights.shards, observers, resume)

    def _with_losses(
        self, trace: RoutingTrace, jumps: tuple[LayerJumps, ...], swaps: int
    ) -> tuple[LayerJumps, ...]:
        """The jumps with what they do to the loss."""
        measured = []
        with only_running(self.model.module):
            for layer in jumps:
                if layer.value is not None:
                    arguments = (trace, trace.layer(layer.name), layer.value, swaps)
                    value = with_losses(self.model.module, *arguments, self.batch_size)
                    layer = replace(layer, value=value)
                measured.append(layer)
                self.progress("losses", len(measured), len(jumps))
        return tuple(measured)

    def noise(self, asked: bool) -> NoiseReport:
        """The noise of the model in memory."""
        if not asked:
            return NoiseReport((), NO_NOISE)
        if self.model.stream is not None:
            return NoiseReport((), STREAMED_NOISE)
        with self.clock("noise"):
            report = own_noise(self.model.module, self.names, self.text, self.batch_size)
            self.progress("noise", 1, 1)
        return report


def _plan(settings: JumpSettings | None, seed: int, loss_jumps: bool) -> JumpSettings:
    plan = replace(settings or JumpSettings(), seed=seed)
    return replace(plan, loss_swaps=32) if loss_jumps and not plan.loss_swaps else plan


def _saved_routing(source: object) -> RoutingTrace | RoutingSummary | None:
    """The trace or summary that `source` is or names; None for a model."""
    if isinstance(source, RoutingTrace | RoutingSummary):
        return source
    if not isinstance(source, str | Path) or source_kind(source) == "model":
        return None
    found = load(source)
    if isinstance(found, RoutingTrace | RoutingSummary):
        return found
    raise ParameterError(f"{source} is a saved result: read it with tieline.load")


def _inspect_saved(
    routed: RoutingTrace | RoutingSummary, settings: MeasureSettings | None, expert_tokens: int
) -> Inspection:
    """What can be measured of a saved run without its model."""
    clock = _Clock()
    with clock("measure"), one_thread():
        if isinstance(routed, RoutingSummary):
            measures, trace = measure_summary(routed, settings), routed.sample
        else:
            measures, trace = measure(routed, settings), routed
    jumps = tuple(LayerJumps(layer.name, None, NO_MODEL) for layer in measures.layers)
    facts, timings = dict(measures.provenance), clock.timings()
    return _inspection(measures, jumps, None, facts, timings, trace, expert_tokens)


def _inspection(
    measures: RoutingMeasures,
    jumps: tuple[LayerJumps, ...],
    sample: TextSample | None,
    provenance: dict[str, object],
    timings: dict[str, float],
    trace: RoutingTrace,
    expert_tokens: int,
) -> Inspection:
    needs = (
        tokens_needed(layer.name, layer.load.counts, layer.tokens, expert_tokens)
        for layer in measures.layers
    )
    return Inspection(
        judgement=judge(measures, jumps),
        observations=observe(measures, jumps),
        metrics=metrics(measures, jumps),
        measures=measures,
        jumps=jumps,
        sample=sample,
        provenance=provenance,
        timings=timings,
        calibration=most_first(needs),
        trace=trace,
    )


class _Clock:
    """Seconds per stage."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._seconds[stage] = time.perf_counter() - before

    def timings(self, tokens: int = 0) -> dict[str, float]:
        """Seconds of each stage, in all, and the tokens per second of the forward passes."""
        found = {**self._seconds, "total": time.perf_counter() - self._start}
        if "forward" in found:
            found["tokens_per_second"] = tokens / max(found["forward"], 1e-9)
        return found


def router_names(model: nn.Module, layers: Collection[str | int] | None) -> tuple[str, ...]:
    """Names of the routers, in the order of the model; places are counted from 0."""
    known = list(find_routers(model))
    if layers is None:
        return tuple(chosen_routers(model, None))
    wrong = [x for x in layers if isinstance(x, int) and not 0 <= x < len(known)]
    require(not wrong, f"no layers {wrong}: the model has routers 0 to {len(known) - 1}")
    return tuple(chosen_routers(model, [known[x] if isinstance(x, int) else x for x in layers]))


def _facts(text: TokenisedText, source: str, batch_size: int, seed: int) -> dict[str, object]:
    """What the bits of a result depend on beside the model: text, batches, threads, build."""
    digest = hashlib.sha256("".join(text.pieces).encode(errors="surrogatepass")).hexdigest()
    return {
        "text": {"source": source, "characters": text.characters, "sha256": digest},
        "tokens": text.tokens,
        "threads": torch.get_num_threads(),
        "torch_build": build_digest(),
        "sequences": len(text.sequences),
        "sequence_length": len(text.sequences[0]),
        "batch_size": batch_size,
        "seed": seed,
    }


def build_digest() -> str:
    """Short digest of how torch was built: matrix products of other builds round differently."""
    return hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:12]


def _silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def inputs_fit(model: nn.Module, names: Collection[str], tokens: int) -> bool:
    """Whether the router inputs can be captured and fit the memory limit."""
    families = [family_of(model.get_submodule(name)) for name in names]
    if any(family is None or family.in_block for family in families):
        return False
    dim = getattr(text_config(model), "hidden_size", None)
    return isinstance(dim, int) and 4 * len(names) * tokens * dim <= MOST_BYTES
