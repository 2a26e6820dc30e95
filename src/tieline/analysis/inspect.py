"""Inspecting a model: gaps, ties, flips, jumps and load of its routing on a text, in one call.

    report = inspect("allenai/OLMoE-1B-7B-0924")
    report.verdict, report.metrics["flip@bf16"], report.trace

The text is cut into sequences without padding and run in evaluation mode without gradients. Gaps,
ties, flips and load are measured on the trace, jumps by swapping tied experts in the model. A
saved trace or summary has no model, so its jumps are not measured.

A model in memory is measured after all passes. A model streamed from disk runs all batches through
one layer at a time, so each layer is measured as soon as the passes have left it, while its weights
are loaded; its router inputs are then dropped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
import transformers
from torch import Tensor, nn

from tieline._version import __version__
from tieline.analysis.inspect_observations import (
    inspection_metrics,
    judge_routing,
    routing_observations,
)
from tieline.analysis.inspect_records import (
    Inspection,
    LayerJumps,
    NoiseReport,
    TextPiece,
    TextSample,
)
from tieline.analysis.job_settings import InspectOptions, InspectSettings
from tieline.analysis.jumps import BlockSampler, JumpSettings, jumps_with_losses, measure_jumps
from tieline.analysis.rounded_runs import SERVED_TOKENS, measure_serving
from tieline.analysis.route_files import load, source_kind
from tieline.analysis.served_precision import Serving, served_rounding
from tieline.core.errors import ParameterError, require
from tieline.core.records import from_plain, to_plain
from tieline.core.setting_fields import require_setting, takes_settings
from tieline.measure.calibration_need import neediest_first, tokens_needed
from tieline.measure.measure_settings import MeasureSettings
from tieline.measure.measures import (
    LayerMeasures,
    MeasuredLayer,
    RoutingMeasures,
    gap_status,
    join_layer_measures,
    measure,
    measure_layers,
)
from tieline.measure.summary_measures import measure_summary
from tieline.models.capture import DEFAULT_EPSILONS, RecorderSettings
from tieline.models.configuration import text_config
from tieline.models.demo import DEMO
from tieline.models.families import chosen_routers, family_of, find_routers
from tieline.models.linear_routers import linear_biases, linear_weights
from tieline.models.model import Model, ModelSource
from tieline.models.routed_block import block_of
from tieline.run.batch_size import halves_batches
from tieline.run.condition import Condition
from tieline.run.corpus import Corpus, TokenisedText
from tieline.run.forward import only_running
from tieline.run.observers import Observer, Rerun, RouteRecorder
from tieline.run.plan import announce_total, clean_plan, pass_cost
from tieline.run.ranks import Ranks
from tieline.run.resume import RunState
from tieline.run.runner import Progress, Runner
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.trace.summary import RoutingSummary

MOST_BYTES = 1 << 30
"""Largest size of the router inputs that are kept in memory during the measurement."""

WATCHED_COST, MEASURE_SECONDS = 1.4, 12e-6
"""Cost of a pass with observed routers and blocks, in clean passes; seconds per token and layer
for the measures."""

JUMPS_NEED_MODEL = "not measured: jumps need the model"
NOISE_NEEDS_MODEL = "not measured: this needs the model"
NO_PRECISION_SERVED = "not measured: no precision served was asked for"
STREAMED_WEIGHTS = (
    "not measured: weights that are streamed are read once more for a precision served"
)
SPLIT_WEIGHTS = "not measured: weights that are cut over processes cannot be rounded"
JUMPS_NOT_REQUESTED = "not measured: jumps were not asked for"

GAPS = "gaps"
"""Key of the gaps in the resume state."""


@dataclass
class LayerMeasurer(Observer):
    """Measures the layers of an inspected model, from disk while their weights are loaded.

    Attributes:
        model: the model.
        recorder: records its routers.
        settings: settings of the measures.
        sampler: samples the calls of its blocks; None if jumps are not requested.
        jump_settings: settings of the jumps.
    """

    model: nn.Module
    recorder: RouteRecorder
    settings: MeasureSettings
    sampler: BlockSampler | None
    jump_settings: JumpSettings
    _measured: dict[str, MeasuredLayer] = field(default_factory=dict)
    _jumps: dict[str, LayerJumps] = field(default_factory=dict)

    def on_unit_done(self, unit: str, rerun: Rerun) -> None:
        """Measure the routers of a finished unit of a streamed model; does nothing in memory."""
        for name in self.recorder.inside(unit) if unit else ():
            trace = self.recorder.layer(name)
            if trace is not None:
                weights = linear_weights(self.model, trace)
                biases = linear_biases(self.model, weights)
                (self._measured[name],) = measure_layers(trace, self.settings, weights, biases)
                self._measure_jumps(trace, name, rerun)

    def _measure_jumps(self, trace: RoutingTrace, name: str, rerun: Rerun) -> None:
        """Measure the jumps of one layer and drop its sample."""
        if self.sampler is None:
            return
        (self._jumps[name],) = measure_jumps(
            self.model, trace, self.sampler, self.jump_settings, runner=rerun
        )
        self.sampler.forget(name)

    def measures(self, trace: RoutingTrace, ranks: Ranks) -> RoutingMeasures:
        """Return the measures of all layers and of the model, given the trace of all batches."""
        if self._measured:
            layers = [self._measured[layer.name] for layer in trace.layers]
        else:
            weights = linear_weights(self.model, trace)
            biases = ranks.join_layers(linear_biases(self.model, weights))
            layers = measure_layers(trace, self.settings, ranks.join_layers(weights), biases)
        return join_layer_measures(layers, self.settings, trace)

    def jumps(
        self,
        trace: RoutingTrace,
        ranks: Ranks,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> tuple[LayerJumps, ...]:
        """Return the jumps of all layers, given the trace of all batches."""
        if self.sampler is None:
            status = JUMPS_NOT_REQUESTED
            return tuple(LayerJumps(layer.name, None, status) for layer in trace.layers)
        if self._jumps:
            return tuple(self._jumps[layer.name] for layer in trace.layers)
        names = self.recorder.names
        local = replace(trace, layers=tuple(x for x in trace.layers if x.name in names))
        with only_running(self.model):
            jumps = measure_jumps(self.model, local, self.sampler, self.jump_settings, on_progress)
        plain = ranks.join_plain([to_plain(layer) for layer in jumps])
        return tuple(from_plain(LayerJumps, layer) for layer in plain) if ranks.staged else jumps

    def state(self, unit: str) -> dict[str, Any] | None:
        """Return the measures of a unit as tensors of values per token and plain records."""
        tensors: dict[str, Tensor] = {}
        values = []
        for name in self.recorder.inside(unit):
            if name not in self._measured:
                continue
            layer, number = self._measured[name], len(values)
            columns = {"noise": layer.noise, "precision": layer.precision}
            tensors |= {
                f"{number}|{kind}|{level}": column
                for kind, levels in columns.items()
                for level, column in levels.items()
            }
            if layer.gaps is not None:
                tensors[f"{number}|{GAPS}|"] = layer.gaps
            jumps = self._jumps.get(name)
            record = to_plain(layer.record, nonfinite_as_text=True)
            plain_jumps = None if jumps is None else to_plain(jumps, nonfinite_as_text=True)
            values.append({"name": name, "record": record, "jumps": plain_jumps})
        return {"tensors": tensors, "values": values} if values else None

    def restore(self, unit: str, state: dict[str, Any]) -> None:
        """Restore the measures of a unit from the state of an earlier run."""
        for number, value in enumerate(state["values"]):
            columns: dict[str, dict[str, Tensor]] = {"noise": {}, "precision": {}, GAPS: {}}
            for key, tensor in state["tensors"].items():
                owner, kind, level = key.split("|", 2)
                if owner == str(number):
                    columns[kind][level] = tensor
            record = from_plain(LayerMeasures, value["record"])
            gaps = columns.pop(GAPS).get("")
            self._measured[value["name"]] = MeasuredLayer(record, gaps, **columns)
            if value["jumps"] is not None:
                self._jumps[value["name"]] = from_plain(LayerJumps, value["jumps"])


@takes_settings(InspectSettings)
@halves_batches(InspectSettings)
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
            trace, a summary or the folder of one, for which only `measure_settings` and
            `expert_tokens` apply.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself. Losses take 2 forward passes of a sequence for each of
            `jump_settings.loss_swaps` (by default 32) tokens per layer, the precision served takes
            three passes of at most 4,096 tokens. With `parallel`, all processes must call it, and
            all get the result.
        progress: called with stage, done and total during the work.
    """
    settings = InspectSettings.of(settings, options)
    routing = _saved_routing(source)
    if routing is not None:
        return _inspect_saved(routing, settings)
    corpus = Corpus(**settings.corpus)
    origin = corpus.origin  # raises for an unreadable text before a model is loaded
    job = "inspect takes a trace or summary, or"
    model = Model.open(source, job, dtype=_dtype_to_open(settings), **settings.loading)
    timer, names = _StageTimer(), router_names(model.module, settings.layers)
    with timer("tokenise"):
        text = corpus.tokenised(model.tokenizer, model.module)
    ranks = Ranks.share_batches(settings.parallel, corpus.batches(text))
    facts = _result_inputs(text, origin, corpus) | ranks.provenance()
    on_progress = progress or (lambda stage, done, total: None)
    inspector = _Inspector(model, names, text, ranks, facts, timer, settings, on_progress)
    if progress is not None and settings.parallel in (None, "data"):
        inspector.announce_duration()
    return inspector.inspection()


def _dtype_to_open(settings: InspectSettings) -> str:
    """Return the precision to open the model in: float32 if streamed weights are also rounded."""
    served = settings.serve not in (None, "none")
    return "fp32" if settings.stream and served and settings.dtype == "auto" else settings.dtype


@dataclass(frozen=True)
class _Inspector:
    """Inspects a model on a text.

    Attributes:
        model: the model, in memory or streamed.
        names: names of the routers to measure.
        text: the text in sequences.
        ranks: batches of the text, and how processes share them.
        facts: everything besides the model that the bits of the result depend on.
        timer: measures the time of each stage.
        settings: options of the inspection.
        progress: called with stage, done and total.
    """

    model: Model
    names: tuple[str, ...]
    text: TokenisedText
    ranks: Ranks
    facts: dict[str, object]
    timer: "_StageTimer"
    settings: InspectSettings
    progress: Progress

    def announce_duration(self) -> None:
        """Report the expected duration to the progress callback if it is long."""
        tokens = sum(ids.numel() for ids in self.ranks.batches)
        work = WATCHED_COST * tokens
        if self.settings.serve != "none":
            served = pass_cost(Condition(served_rounding(self.settings.serve or "bf16")))
            work += min(tokens, SERVED_TOKENS) * (1 + 2 * served)
        if self.settings.loss_jumps:
            swaps = len(self.names) * _jump_settings(self.settings).loss_swaps
            work += 2 * swaps * len(self.text.sequences[0])
        measure_seconds = MEASURE_SECONDS * tokens * len(self.names)
        announce_total(self.model, self.ranks.batches, work, self.progress, measure_seconds)

    def inspection(self) -> Inspection:
        """Measure everything that the settings ask for."""
        trace, measures, jumps = self._measure_layers()
        serving, noise = self._measure_serving()
        name = {"model": self.model.name} if self.model.name else {}
        return replace(
            _assembled_inspection(
                measures, jumps, trace, self.settings.expert_tokens, noise, serving
            ),
            sample=text_sample(trace, self.text),
            provenance=dict(trace.provenance) | name,
            timings=self.timer.timings(trace.n_tokens),
        )

    def _measure_layers(self) -> tuple[RoutingTrace, RoutingMeasures, tuple[LayerJumps, ...]]:
        """Run the text once and measure its layers, from disk while their weights are loaded."""
        settings = self.settings
        jump_settings = _jump_settings(settings)
        measure_settings = settings.measure_settings or MeasureSettings()
        streamed, losses = self.model.stream is not None, settings.loss_jumps and settings.jumps
        require_setting(
            not (settings.loss_jumps and streamed),
            "what flips do to the loss needs the model in memory: no {loss_jumps}",
        )
        module, grids = self.model.module, measure_settings
        recorder = RouteRecorder(module, self._recorder_settings(streamed), self.names)
        sampler = self._block_sampler(recorder, jump_settings) if settings.jumps else None
        measurer = LayerMeasurer(module, recorder, grids, sampler, jump_settings)
        observers = [recorder, measurer] if sampler is None else [recorder, sampler, measurer]
        with self.timer("forward"):
            state = self._resume_state([grids, jump_settings], observers, settings.resume)
            runner = Runner(self.model, ranks=self.ranks)
            plan = clean_plan("forward", self.ranks.numbered)
            runner.run(plan, observers, self.progress, resume=state)
            if state is not None:
                state.clear()
        trace = recorder.trace()
        trace = replace(trace, provenance={**trace.provenance, **self.facts})
        with self.timer("measure"):
            measures = measurer.measures(trace, self.ranks)
        with self.timer("jumps"):
            layer_jumps = measurer.jumps(trace, self.ranks, partial(self.progress, "jumps"))
            if losses:
                layer_jumps = self._add_losses(trace, layer_jumps, jump_settings.loss_swaps)
        layers = tuple(replace(layer, inputs=None) for layer in trace.layers)
        return replace(trace, layers=layers), measures, layer_jumps

    def _recorder_settings(self, streamed: bool) -> RecorderSettings:
        """Return what to record; a streamed model holds the inputs of one layer at a time."""
        names = self.names[:1] if streamed else self.names
        inputs = router_inputs_fit(self.model.module, names, self.text.tokens)
        return RecorderSettings(4, DEFAULT_EPSILONS, inputs, True)

    def _block_sampler(self, recorder: RouteRecorder, settings: JumpSettings) -> BlockSampler:
        """Return the sampler of the blocks of all measured routers."""
        blocks = {name: block_of(self.model.module, name) for name in self.names}
        sizes = (settings.near, settings.random, settings.seed, self.ranks.tokens)
        return BlockSampler(blocks, recorder, *sizes)

    def _resume_state(
        self, settings: list[Any], observers: Sequence[Observer], resume: bool
    ) -> RunState | None:
        """Return the resume state, keyed by a digest of all inputs; None for a model in memory."""
        stream = self.model.stream
        if stream is None:
            return None
        groups = {unit: group.count for unit, group in stream.groups.items()}
        versions = [__version__, torch.__version__, transformers.__version__]
        config = json.loads(stream.model.config.to_json_string())
        observer_names = [type(observer).__name__ for observer in observers]
        plain = [to_plain(settings), groups, versions, config, observer_names, list(self.names)]
        facts = {"run": self.facts, "settings": plain, "dtype": str(stream.model.dtype)}
        return RunState(facts, stream.weights.shards, observers, resume)

    def _add_losses(
        self, trace: RoutingTrace, jumps: tuple[LayerJumps, ...], swaps: int
    ) -> tuple[LayerJumps, ...]:
        """Add the changes of the loss to the jumps of every layer."""
        model, batch_size = self.model.module, self.settings.batch_size
        layers = []
        with only_running(model):
            for layer in jumps:
                if layer.value is not None:
                    layer_trace = trace.layer(layer.name)
                    value = jumps_with_losses(
                        model, trace, layer_trace, layer.value, swaps, batch_size
                    )
                    layer = replace(layer, value=value)
                layers.append(layer)
                self.progress("losses", len(layers), len(jumps))
        return tuple(layers)

    def _measure_serving(self) -> tuple[Serving | None, NoiseReport]:
        """Measure the effect of the precision served on the model, or return why not."""
        serve, streamed = self.settings.serve, self.model.stream is not None
        precision = serve or ("none" if streamed else "bf16")
        if precision == "none":
            return None, NoiseReport((), NO_PRECISION_SERVED if serve else STREAMED_WEIGHTS)
        if self.settings.parallel not in (None, "data"):
            return None, NoiseReport((), SPLIT_WEIGHTS)
        arguments = (self.model, self.names, self.text, self.settings.batch_size)
        with self.timer("served precision"):
            return measure_serving(*arguments, precision, self.progress)


def _jump_settings(settings: InspectSettings) -> JumpSettings:
    """Return the jump settings with the seed of the inspection, and by default 32 loss swaps."""
    jumps = replace(settings.jump_settings or JumpSettings(), seed=settings.seed)
    return replace(jumps, loss_swaps=32) if settings.loss_jumps and not jumps.loss_swaps else jumps


def _saved_routing(source: object) -> RoutingTrace | RoutingSummary | None:
    """Return the trace or summary that `source` is or names; None for a model."""
    if isinstance(source, RoutingTrace | RoutingSummary):
        return source
    if not isinstance(source, str | Path) or source_kind(source) == "model":
        return None
    saved = load(source)
    if isinstance(saved, RoutingTrace | RoutingSummary):
        return saved
    raise ParameterError(f"{source} is a saved result: read it with tieline.load")


def _inspect_saved(routing: RoutingTrace | RoutingSummary, settings: InspectSettings) -> Inspection:
    """Inspect a trace or summary without its model."""
    timer, grids = _StageTimer(), settings.measure_settings
    with timer("measure"):
        if isinstance(routing, RoutingSummary):
            measures, trace = measure_summary(routing, grids), routing.sample
        else:
            measures, trace = measure(routing, grids), routing
    jumps = tuple(LayerJumps(layer.name, None, JUMPS_NEED_MODEL) for layer in measures.layers)
    noise = NoiseReport((), NOISE_NEEDS_MODEL)
    result = _assembled_inspection(measures, jumps, trace, settings.expert_tokens, noise)
    return replace(result, provenance=dict(measures.provenance), timings=timer.timings())


def _assembled_inspection(
    measures: RoutingMeasures,
    jumps: tuple[LayerJumps, ...],
    trace: RoutingTrace,
    expert_tokens: int,
    noise: NoiseReport,
    serving: Serving | None = None,
) -> Inspection:
    """Assemble the result without text sample, provenance and timings."""
    needs = (
        tokens_needed(layer.name, layer.load.counts, layer.tokens, expert_tokens)
        for layer in measures.layers
    )
    return Inspection(
        judgement=judge_routing(measures, jumps, serving),
        observations=routing_observations(measures, jumps),
        metrics=inspection_metrics(measures, jumps) | (serving.metrics if serving else {}),
        measures=measures,
        jumps=jumps,
        sample=None,
        provenance={},
        timings={},
        calibration=neediest_first(needs),
        noise=noise,
        serving=serving,
        trace=trace,
    )


class _StageTimer:
    """Measures the seconds of each stage."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[stage] = time.perf_counter() - start

    def timings(self, tokens: int = 0) -> dict[str, float]:
        """Return the seconds of each stage and in total, and tokens per second of the passes."""
        seconds = {**self._seconds, "total": time.perf_counter() - self._start}
        if "forward" in seconds:
            seconds["tokens_per_second"] = tokens / max(seconds["forward"], 1e-9)
        return seconds


def router_names(model: nn.Module, layers: Collection[str | int] | None) -> tuple[str, ...]:
    """Return the names of the chosen routers in the order of the model; numbers count from 0."""
    if layers is None:
        return tuple(chosen_routers(model, None))
    routers = list(find_routers(model))
    missing_layers = [x for x in layers if isinstance(x, int) and not 0 <= x < len(routers)]
    require(
        not missing_layers,
        f"no layers {missing_layers}: the model has routers 0 to {len(routers) - 1}",
    )
    return tuple(chosen_routers(model, [routers[x] if isinstance(x, int) else x for x in layers]))


def _result_inputs(text: TokenisedText, origin: str, corpus: Corpus) -> dict[str, object]:
    """Return everything besides the model that the bits of a result depend on.

    This includes the build of torch, because matrix products of other builds round differently.
    """
    return {
        "text": {"source": origin, "characters": text.characters, "sha256": text.digest},
        "tokens": text.tokens,
        "threads": torch.get_num_threads(),
        "torch_build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:12],
        "sequences": len(text.sequences),
        "sequence_length": len(text.sequences[0]),
        "batch_size": corpus.batch_size,
        "seed": corpus.seed,
    }


def router_inputs_fit(model: nn.Module, names: Collection[str], tokens: int) -> bool:
    """Return whether the router inputs can be captured and fit the memory limit."""
    families = [family_of(model.get_submodule(name)) for name in names]
    if any(family is None or family.in_block for family in families):
        return False
    dim = getattr(text_config(model), "hidden_size", None)
    return isinstance(dim, int) and 4 * len(names) * tokens * dim <= MOST_BYTES


def text_sample(trace: RoutingTrace, text: TokenisedText, most: int = 400) -> TextSample:
    """Return the first tokens of the text with gaps relative to each layer's median gap.

    Args:
        trace: routing of `text`, in order.
        text: the routed text.
        most: largest number of tokens, from the first sequence.
    """
    count = min(most, len(text.sequences[0]))
    texts = ["" for _ in text.prefix] + list(text.pieces)
    columns, scales = zip(*(_relative_gaps(layer, count) for layer in trace.layers), strict=True)
    pieces = []
    for index, gaps in enumerate(zip(*columns, strict=True)):
        smallest = min((gap for gap in gaps if gap is not None), default=None)
        token, position = int(trace.tokens[index]), int(trace.positions[index])
        pieces.append(TextPiece(texts[index], token, position, smallest, gaps))
    names = tuple(layer.name for layer in trace.layers)
    return TextSample(names, int(trace.documents[0]), tuple(pieces), tuple(scales))


def _relative_gaps(layer: LayerTrace, count: int) -> tuple[list[float | None], float | None]:
    """Return the first gaps divided by the median gap, and that median; None if unknown."""
    unknown_gaps: list[float | None] = [None] * count
    if gap_status(layer) != "ok":
        return unknown_gaps, None
    gaps = layer.gap
    median_gap = gaps.median().item()
    if not 0 < median_gap < float("inf"):
        return unknown_gaps, None
    return [
        gap if gap < float("inf") else None for gap in (gaps[:count] / median_gap).tolist()
    ], median_gap


def linear_choice_status(layer: LayerTrace, weights: dict[str, Tensor]) -> str:
    """Return "ok" if a layer chooses the top k of logits affine in its input, else the reason.

    Args:
        layer: the layer's trace.
        weights: result of `linear_weights`.
    """
    status = gap_status(layer)
    if status != "ok":
        return status
    if layer.smoothed:
        return "not answerable: a smoothed router has no walls"
    if layer.facts.n_groups > 1:
        return "not answerable: experts are chosen within groups, whose walls are not flat"
    if layer.bias is not None and layer.facts.units != "logits":
        return f"not answerable: a bias is added to {layer.facts.units} scores: walls are not flat"
    if layer.name not in weights:
        return "not answerable: no matrix of the router explains its logits"
    return "ok"
