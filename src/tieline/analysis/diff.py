"""Compare two runs: models, saved traces or routes of an engine, in any combination.

    diff("org/model", "org/model", dtype_b="bf16-emulated")   two models on one text
    diff("trace/", "routes.npz")                              two saved runs
    diff("org/model", "routes.npz")                           a model on the tokens of a saved run

Two models run side by side, batch by batch, so that no logits are kept: the distances of their
predictions are measured token by token (`token_distances`).
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from jaxtyping import Int
from torch import Tensor

from tieline.analysis.compared_sides import (
    ModelSide,
    NamedSide,
    check_same_tokens,
    check_vocabulary,
    renumbered_documents,
    split_dtype,
    trace_model,
)
from tieline.analysis.comparison import compare_runs, diff_result
from tieline.analysis.diff_records import ReplaySplit, RoutingDiff
from tieline.analysis.inspect_records import Observation
from tieline.analysis.job_settings import DiffOptions, DiffSettings
from tieline.analysis.noise_size import canonical_format, expected_format
from tieline.analysis.replay_split import replay_split
from tieline.analysis.served_precision import recommend
from tieline.analysis.sound_runs import REFERENCE_TOKENS, recorded_plain_run, sound_runs
from tieline.analysis.token_distances import (
    DistanceObserver,
    PairedPasses,
    compared_logits,
    mean_kl,
)
from tieline.core.errors import require
from tieline.core.numerics import one_thread
from tieline.core.setting_fields import require_setting, takes_settings
from tieline.core.statistics import Estimate
from tieline.models.model import ModelSource
from tieline.models.parallel import UNROUNDED, check_parallel, check_rounding
from tieline.run.batch_size import halves_batches
from tieline.run.corpus import default_sequence_length, stacked_batches, text_and_origin, tokenise
from tieline.run.plan import Pass, Phase, Plan, announce_total, plan_work
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, Runner
from tieline.trace.record import RoutingTrace
from tieline.trace.selection import token_sequences

Source = ModelSource | RoutingTrace
"""A model by name or as (model, tokenizer), a trace, or a folder or file of routes."""


@takes_settings(DiffSettings)
@halves_batches(DiffSettings)
def diff(
    a: Source,
    b: Source,
    *,
    settings: DiffSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[DiffOptions],
) -> RoutingDiff:
    """Compare the routing of two runs on the same tokens, and whether near-ties explain it.

    Two models run on `text`; a model compared with a trace runs on the tokens of the trace. If an
    engine ran a quantised copy of the other side's model, the dequantised weights also run in
    transformers, which separates the effect of the format from that of the engine. If a model runs
    in float32, it runs five times more in the expected format on up to 4,096 tokens, to measure the
    noise of the format.

    Args:
        a: the reference: a hub id, a folder, "demo", `(model, tokenizer)`, a trace, the folder
            of a trace, a file of routes, or a model in an engine: "vllm:MODEL", "mlx:MODEL",
            "llama.cpp:FILE.gguf". The result uses its names and numbers.
        b: the other run, in the same forms.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself. With `parallel`, all processes must call, and all get the result.
        progress: called with stage, done and total.
    """
    settings = DiffSettings.of(settings, options)
    sides = (_named_side("A", a, settings), _named_side("B", b, settings))
    kinds = [side.checked_kind() for side in sides]
    _check_parallel(settings.parallel, kinds, sides)
    if settings.expect is not None:
        canonical_format(settings.expect)
    if "engine" in kinds:
        from tieline.analysis.engine_diff import diff_engines

        result = diff_engines(sides, settings, progress)
    else:
        result = _diff_without_engines(sides, kinds, settings, progress)
    processes = Ranks(settings.parallel, ()).provenance()
    facts: dict[str, Any] = dict(result.provenance) | processes
    for key, side in zip("ab", sides, strict=True):
        facts[key] = facts[key] | side.provenance
    return replace(result, provenance=facts)


def _named_side(name: str, source: Source, settings: DiffSettings) -> NamedSide:
    """Side "A" or "B" with its settings."""
    shared = ("device", "trust_remote_code", "stream", "parallel")
    dtype, experts_impl, revision = (
        getattr(settings, f"{field}_{name.lower()}")
        for field in ("dtype", "experts_impl", "revision")
    )
    load = {field: getattr(settings, field) for field in shared}
    return NamedSide(name, source, dtype, experts_impl, revision, load)


def _diff_without_engines(
    sides: tuple[NamedSide, NamedSide],
    kinds: Sequence[str],
    settings: DiffSettings,
    progress: Progress | None,
) -> RoutingDiff:
    """Compare two models, a model and a saved run, or two saved runs."""
    models = [kind == "model" for kind in kinds]
    engine_settings = (settings.tokenizer, settings.engine_python, settings.engine_defaults)
    require_setting(
        engine_settings == (None, None, False),
        "{tokenizer}, {engine_python} and {engine_defaults} are for sides such as vllm:MODEL",
    )
    if all(models):
        return _diff_named_models(sides, settings, progress)
    require_setting(
        settings.text is None,
        "{text}: a text is for two models: a model beside a trace runs on the tokens of the trace",
    )
    require_setting(not settings.replay, "{replay} is for two models: a trace cannot be run")
    require_setting(
        settings.batch_size_b is None, "{batch_size_b} is for two models: a trace has no batches"
    )
    if any(models):
        return _diff_model_and_trace(sides, models.index(True), settings, progress)
    shape = settings.n_experts, settings.k
    first, second = (side.trace(*shape) for side in sides)
    return _diff_traces(first, second, settings)


def _check_parallel(parallel: str | None, kinds: Sequence[str], sides: Sequence[NamedSide]) -> None:
    """Raise for sides that processes cannot share: engines, saved runs, and split rounding."""
    if parallel is None:
        return
    check_parallel(parallel)
    require("engine" not in kinds, "an engine runs by itself: compare with it in one process")
    require("model" in kinds, "two saved runs are compared in one process")
    for side in sides:
        if split_dtype(side.dtype)[1] is not None:
            check_rounding(parallel, f"the dtype {side.dtype!r} of {side.side}")


def _diff_traces(
    a: RoutingTrace,
    b: RoutingTrace,
    settings: DiffSettings,
    references: Sequence[RoutingTrace] = (),
) -> RoutingDiff:
    """Compare two saved or recorded runs."""
    started = time.perf_counter()
    expected = expected_format(settings.expect, a.provenance, b.provenance)
    with one_thread():  # many small operations
        options = {"partial": settings.partial, "references": references, "expected": expected}
        compared = compare_runs(a, b, **options)
    return diff_result(compared, None, {"compare": time.perf_counter() - started}, expected)


def _diff_named_models(
    sides: tuple[NamedSide, NamedSide], settings: DiffSettings, progress: Progress | None
) -> RoutingDiff:
    """Compare two models on a text, and split their KL by replay if `replay` is set."""
    text, origin = text_and_origin(settings.text)
    sources = [side.source[0] if isinstance(side.source, tuple) else side.source for side in sides]
    first, second = sides
    if sources[0] is sources[1] and first.experts != second.experts:
        second = second._replace(source=copy.deepcopy(second.source))
    a = first.open_model()
    b = _side_on_same_weights(first, second, a) or second.open_model()
    lengths = [default_sequence_length(side.model, settings.sequence_length) for side in (a, b)]
    sequences = tokenise(a.tokenizer, text, settings.tokens, lengths[0]).sequences
    if b.tokenizer is not a.tokenizer or lengths[0] != lengths[1]:
        others = tokenise(b.tokenizer, text, settings.tokens, lengths[1]).sequences
        check_same_tokens(sequences, others)
    if a.stream is not None or b.stream is not None:
        _check_streams((a, b), settings)
    run = {name: getattr(settings, name) for name in ("batch_size", "expect", "batch_size_b")}
    result = diff_models(a, b, sequences, progress=progress, parallel=settings.parallel, **run)
    facts: dict[str, object] = {"text": origin, "tokens": sum(map(len, sequences))}
    if settings.batch_size_b is not None:
        facts["sequences per pass"] = f"{settings.batch_size} in A, {settings.batch_size_b} in B"
    result = replace(result, provenance=result.provenance | facts)
    if not settings.replay:
        return result
    ranks = Ranks.share_batches(
        settings.parallel, list(stacked_batches(sequences, settings.batch_size))
    )
    return _with_replay(result, replay_split(a, b, ranks))


def _side_on_same_weights(
    first: NamedSide, second: NamedSide, opened: ModelSide
) -> ModelSide | None:
    """The second side on the weights of the first if both have the same name, else None."""
    same_name = isinstance(first.source, str) and all(
        getattr(first, field) == getattr(second, field)
        for field in ("source", "experts", "revision", "load")
    )
    dtypes = [split_dtype(side.dtype)[0] for side in (first, second)]
    single = all(x.dtype == torch.float32 for x in opened.model.parameters())
    if not same_name or opened.stream is not None:
        return None
    if dtypes[0] != dtypes[1] and not (dtypes[1] == "fp32" and single):
        return None
    return opened._replace(emulated=split_dtype(second.dtype)[1])


def _check_streams(sides: Sequence[ModelSide], settings: DiffSettings) -> None:
    """Raise for options that need both models in memory if one is streamed."""
    are_streamed = all(side.stream is not None for side in sides)
    require_setting(are_streamed, "both models are streamed, or none ({stream})")
    emulated = any(side.emulated is not None for side in sides)
    require_setting(
        not emulated and not settings.replay and settings.batch_size_b is None,
        "emulated formats, {replay} and {batch_size_b} need the models in memory: leave out "
        "{stream}",
    )


def _with_replay(result: RoutingDiff, split: ReplaySplit) -> RoutingDiff:
    """The result with the share of the KL that replaying A's routes removes."""
    numbers = {"kl:ids replayed": split.ids.kl, "kl:ids and weights replayed": split.both.kl}
    observation = Observation("replay", "info", split.by_ids)
    serving = result.serving
    if serving is not None:
        serving = replace(serving, replayed=Estimate(split.both.kl, split.both.error))
    return replace(
        result,
        replay=split,
        serving=serving,
        recommendation=None if serving is None else recommend(serving),
        metrics=result.metrics | numbers,
        observations=(*result.observations, observation),
    )


def _diff_model_and_trace(
    sides: tuple[NamedSide, NamedSide],
    model_side: int,
    settings: DiffSettings,
    progress: Progress | None,
) -> RoutingDiff:
    """Compare a model, side 0 or 1, with a trace on the tokens of the trace."""
    saved = sides[1 - model_side].trace(settings.n_experts, settings.k)
    sequences, documents = token_sequences(saved)
    side, parallel = sides[model_side].open_model(), settings.parallel
    check_vocabulary(side.model, sequences)
    run = {"documents": documents, "batch_size": settings.batch_size}
    recorded = trace_model(side, sequences, **run, progress=progress, parallel=parallel)
    traces = (recorded, saved) if model_side == 0 else (saved, recorded)
    expected = expected_format(settings.expect, traces[0].provenance, traces[1].provenance)
    references: list[RoutingTrace] = []
    if parallel not in UNROUNDED and side.stream is None:
        size = settings.batch_size
        references = sound_runs((side,), (recorded,), sequences, expected, size)
    references = [renumbered_documents(run, documents) for run in references]
    return _diff_traces(*traces, settings, references)


RECORDED_PASS_COST = 1.3
"""Cost of a pass whose routers are recorded and compared, in passes."""
REFERENCE_RUNS_COST = 8.0
"""Cost of the reference runs, up to the last router, and of their comparison, in passes."""


def diff_models(
    a: ModelSide,
    b: ModelSide,
    sequences: Sequence[Int[Tensor, " _"]],
    *,
    batch_size: int = 8,
    expect: str | None = None,
    progress: Progress | None = None,
    batch_size_b: int | None = None,
    parallel: str | None = None,
) -> RoutingDiff:
    """Compare the routing and predictions of two models on the same tokens.

    Args:
        a: the reference.
        b: the other model, which may be the same object unless its weights are streamed.
        sequences: token ids, each sequence a document.
        batch_size: sequences per forward pass.
        expect: number format whose noise is expected; by default the coarser that both recorded.
        progress: called with stage, done and total.
        batch_size_b: sequences per forward pass of B, by default those of A.
        parallel: how processes share the models, which were loaded for it.
    """
    require(
        a.model is not b.model or a.stream is None,
        "A and B are one model that is streamed: open it twice, or have it in memory",
    )
    started, sizes = time.perf_counter(), (batch_size, batch_size_b or batch_size)
    ranks = Ranks.share_batches(parallel, list(stacked_batches(sequences, max(sizes))))
    plan, split = _paired_passes((a, b), ranks, sizes)
    models = (a.model, b.model)
    recorders, predictions = (a.recorder(0), b.recorder(1)), DistanceObserver(split, models)
    if parallel in (None, "data"):
        tokens = sum(ids.numel() for ids in ranks.batches)
        work = RECORDED_PASS_COST * plan_work(plan) + REFERENCE_RUNS_COST * min(
            tokens, REFERENCE_TOKENS
        )
        announce_total(a.runner_model, ranks.batches, work, progress)
    runner = Runner(a.runner_model, b.runner_model, ranks=ranks)
    runner.run(plan, [*recorders, predictions], progress)
    traces, distances = [recorder.trace() for recorder in recorders], predictions.distances
    expected = expected_format(expect, traces[0].provenance, traces[1].provenance)
    references: list[RoutingTrace] = []
    reference_distances, plain = DistanceObserver() if distances else None, None
    if parallel is None and sizes[0] == sizes[1]:
        run = (sequences, expected, batch_size)
        plain = recorded_plain_run((a, b), traces, distances or (), *run)
    if reference_distances is not None and plain is not None:
        reference_distances.distances = [plain[1]]
    if parallel not in UNROUNDED and a.stream is None:
        run = (traces, sequences, expected, batch_size)
        recorded = None if plain is None else plain[0]
        references = sound_runs((a, b), *run, predictions=reference_distances, plain=recorded)
    reference_kl = None
    if references and reference_distances is not None:
        reference_kl = mean_kl(reference_distances.distances, references[0].documents)
    run_end = time.perf_counter()
    with one_thread():
        compared = compare_runs(*traces, references=references, expected=expected)
    timings = {"forward": run_end - started, "compare": time.perf_counter() - run_end}
    logits = compared_logits(compared, distances)
    return diff_result(compared, logits, timings, expected, reference_kl)


def _paired_passes(
    sides: tuple[ModelSide, ModelSide], ranks: Ranks, sizes: tuple[int, int]
) -> tuple[Plan, list[PairedPasses]]:
    """Plan of the passes of two models over the same batches, and passes over the same sequences.

    If the sides have different numbers of sequences per pass, each batch is split for each side.
    """
    a, b = (side.condition for side in sides)
    if sizes[0] == sizes[1]:
        firsts = [Pass(n, a) for n in ranks.numbered]
        seconds = [Pass(first.batch, b, first, model=1) for first in firsts]
        passes = (*firsts, *seconds)
        if ranks.parallel == "fsdp":  # alternate the models, as `Ranks.keep_pace` does
            passes = tuple(run for pair in zip(firsts, seconds, strict=True) for run in pair)
        return Plan((Phase("forward", ranks.numbered, passes, logits="optional"),)), []
    cut: dict[int, Tensor] = {}
    split: list[PairedPasses] = []
    for ids in ranks.batches:
        rows = []
        for model, (condition, size) in enumerate(zip((a, b), sizes, strict=True)):
            pieces = dict(enumerate(ids.split(size), len(cut)))
            cut |= pieces
            rows.append(tuple(Pass(n, condition, model=model) for n in pieces))
        split.append((rows[0], rows[1]))
    passes = tuple(run for rows in split for side in rows for run in side)
    return Plan((Phase("forward", cut, passes, logits="optional"),)), split
