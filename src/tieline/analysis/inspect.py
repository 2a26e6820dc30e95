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
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack

import torch
import transformers
from torch import nn

from tieline._version import __version__
from tieline.analysis.calibration import most_first, tokens_needed
from tieline.analysis.findings import judge, metrics, observe
from tieline.analysis.inspection import Inspection, LayerJumps, NoiseReport, TextSample
from tieline.analysis.jump import JumpSettings, measure_jumps, with_losses
from tieline.analysis.linear import linear_weights
from tieline.analysis.own_noise import own_noise
from tieline.analysis.settings import InspectOptions, InspectSettings
from tieline.analysis.sources import ModelSource, as_model, load, source_kind
from tieline.analysis.stream_state import RunState
from tieline.analysis.streamed import StreamedLayers
from tieline.analysis.swap import BlockSampler, block_of
from tieline.analysis.text import text_sample
from tieline.core.errors import ParameterError, require
from tieline.core.numerics import one_thread
from tieline.core.records import from_plain, to_plain
from tieline.core.settings import takes_settings
from tieline.measure.measure_records import MeasureSettings
from tieline.measure.measures import RoutingMeasures, measure, measure_summary
from tieline.models.capture import capture
from tieline.models.demo import DEMO
from tieline.models.families import chosen_routers, family_of, find_routers
from tieline.models.running import batches, forward, only_running, text_config
from tieline.models.spread import SHARES_TEXT
from tieline.models.streaming import ModelStream
from tieline.run.corpus import TokenisedText, as_text, default_length, tokenise
from tieline.run.processes import Ranks
from tieline.trace.record import RoutingTrace
from tieline.trace.summary import RoutingSummary

Progress = Callable[[str, int, int], None]
"""Called with the stage ("forward", "jumps", "losses", "noise"), what is done, and of how much."""

MOST_BYTES = 1 << 30
"""Largest size of the router inputs that are kept in memory during the measurement."""

NO_JUMPS = "not measured: jumps were not asked for"
NO_MODEL = "not measured: jumps need the model"
NO_NOISE = "not measured: the noise of the model was not asked for"


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
    share = Ranks.of(parallel, list(batches(tokenised.sequences, batch_size)))
    run = _Run(model, names, tokenised, share, tokenised.tokens, batch_size, progress or _silent)
    plan = _plan(settings.jump_settings, seed, settings.loss_jumps)
    sampler = run.sampler(plan) if settings.jumps else None
    facts = _facts(tokenised, origin, batch_size, seed) | share.provenance()
    rounds = settings.noise and parallel in (None, "data")
    losses, resume = settings.loss_jumps, settings.resume
    work = _Work(loaded.stream, plan, measuring, facts, clock, losses, rounds, resume)
    ways = _streamed if loaded.stream is not None else _in_memory
    trace, measures, found, noise_found = ways(run, sampler, work)
    facts = dict(trace.provenance) | ({"model": loaded.name} if loaded.name else {})
    sample, timings = text_sample(trace, tokenised), clock.timings(trace.n_tokens)
    told = _inspection(measures, found, sample, facts, timings, trace, expert_tokens)
    return replace(told, noise=noise_found)


def _noise(run: "_Run", work: "_Work") -> NoiseReport:
    """The noise of the model in memory."""
    if not work.noise:
        return NoiseReport((), NO_NOISE)
    with work.clock("noise"):
        report = own_noise(run.model, run.names, run.text, run.batch_size)
        run.progress("noise", 1, 1)
    return report


class _Found(NamedTuple):
    """What both ways to run a model give."""

    trace: RoutingTrace
    measures: RoutingMeasures
    jumps: tuple[LayerJumps, ...]
    noise: NoiseReport


def _in_memory(run: "_Run", sampler: BlockSampler | None, work: "_Work") -> _Found:
    """Run the whole model, then measure."""
    with work.clock("forward"):
        trace = run.trace(sampler)
    trace = replace(trace, provenance={**trace.provenance, **work.facts})
    weights = run.share.join_layers(linear_weights(run.model, trace))
    with work.clock("measure"), one_thread():  # many small operations
        measures = measure(trace, work.settings, weights)
    with work.clock("jumps"):
        found = run.jumps(trace, sampler, work.plan, work.losses)
    noise = _noise(run, work)
    trace = replace(trace, layers=tuple(replace(layer, inputs=None) for layer in trace.layers))
    return _Found(trace, measures, found, noise)


def _streamed(run: "_Run", sampler: BlockSampler | None, work: "_Work") -> _Found:
    """Measure each layer while it is in memory."""
    assert work.stream is not None
    require(not work.losses, "what flips do to the loss needs the model in memory: no loss_jumps")
    model, names = run.model, run.names
    keep = "inputs" if inputs_fit(model, names[:1], run.tokens) else "scores"
    ids = list(run.share.batches)
    with work.clock("forward"), only_running(model), ExitStack() as stack:
        seen = stack.enter_context(capture(model, keep=keep, layers=names))
        if sampler is not None:
            stack.enter_context(sampler.watching(seen))
        settings, matrices = work.settings or MeasureSettings(), partial(linear_weights, model)
        state = _state(run, work, keep, jumps=sampler is not None)
        parts = (settings, matrices, sampler, work.plan, state)
        layers = StreamedLayers(work.stream, seen, names, *parts)
        layers.run(ids, partial(run.progress, "streaming"))
        trace = seen.trace()
        state.clear()
    trace = replace(trace, provenance={**trace.provenance, **work.facts})
    none = LayerJumps("", None, NO_JUMPS)
    jumps = [layers.jumps.get(one.name, replace(none, name=one.name)) for one in trace.layers]
    noise = NoiseReport((), "not measured: weights that are streamed cannot be rounded")
    return _Found(trace, layers.measures(trace), tuple(jumps), noise)


def _state(run: "_Run", work: "_Work", keep: str, jumps: bool) -> RunState:
    """What is kept of the run while it goes on, under all that its numbers depend on."""
    assert work.stream is not None
    plans = [to_plain(work.settings or MeasureSettings()), to_plain(work.plan)]
    groups = {unit: group.count for unit, group in work.stream.groups.items()}
    versions = [__version__, torch.__version__, transformers.__version__]
    config = json.loads(work.stream.model.config.to_json_string())
    settings = [plans, groups, versions, config, keep, jumps, list(run.names)]
    facts = {"run": work.facts, "settings": settings, "dtype": str(work.stream.model.dtype)}
    return RunState(facts, work.stream.weights.shards, work.resume)


class _Work(NamedTuple):
    """How a run is measured, and what is recorded of it."""

    stream: ModelStream | None
    plan: JumpSettings
    settings: MeasureSettings | None
    facts: dict[str, object]
    clock: "_Clock"
    losses: bool
    noise: bool
    resume: bool = False


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


class _Run(NamedTuple):
    """The parts of an inspection that run the model."""

    model: nn.Module
    names: tuple[str, ...]
    text: TokenisedText
    share: Ranks
    tokens: int
    batch_size: int
    progress: Progress

    def sampler(self, plan: JumpSettings) -> BlockSampler:
        """What looks at the blocks of the routers."""
        blocks = {name: block_of(self.model, name) for name in self.names}
        return BlockSampler(blocks, plan.near, plan.random, plan.seed, self.share.tokens)

    def trace(self, sampler: BlockSampler | None) -> RoutingTrace:
        """The routing of the whole text."""
        keep = "inputs" if inputs_fit(self.model, self.names, self.tokens) else "scores"
        with only_running(self.model):
            with capture(self.model, keep=keep, layers=self.names) as seen:
                with sampler.watching(seen) if sampler else nullcontext():
                    for ids in self.share.batches:
                        forward(self.model, ids)
                        self.progress("forward", seen.n_tokens, self.share.rank_tokens)
                part = seen.trace()
            self.share.keep_pace(self.model)
        if sampler is not None and self.share.parallel in SHARES_TEXT:
            sampler.join(self.share.join_rows)
        return self.share.join_trace(part)

    def jumps(
        self, trace: RoutingTrace, sampler: BlockSampler | None, plan: JumpSettings, losses: bool
    ) -> tuple[LayerJumps, ...]:
        """The jumps of every layer, with losses if asked for."""
        if sampler is None:
            return tuple(LayerJumps(layer.name, None, NO_JUMPS) for layer in trace.layers)
        with only_running(self.model):
            own = replace(trace, layers=tuple(trace.layer(name) for name in self.names))
            found = measure_jumps(self.model, own, sampler, plan, self._told("jumps"))
            found = self._everywhere(found)
            if not losses:
                return found
            done = []
            for layer, jumps in zip(trace.layers, found, strict=True):
                done.append(self._with_losses(trace, layer.name, jumps, plan))
                self.progress("losses", len(done), len(found))
        return tuple(done)

    def _everywhere(self, own: tuple[LayerJumps, ...]) -> tuple[LayerJumps, ...]:
        """The jumps of all layers, also of those that other processes hold."""
        if self.share.parallel != "pp":
            return own
        plain = self.share.join_plain([to_plain(jumps) for jumps in own])
        return tuple(from_plain(LayerJumps, jumps) for jumps in plain)

    def _with_losses(
        self, trace: RoutingTrace, name: str, jumps: LayerJumps, plan: JumpSettings
    ) -> LayerJumps:
        if jumps.value is None:
            return jumps
        arguments = (trace, trace.layer(name), jumps.value, plan.loss_swaps, self.batch_size)
        return replace(jumps, value=with_losses(self.model, *arguments))

    def _told(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(stage, done, total)


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
