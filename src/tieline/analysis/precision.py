"""Auditing a model: what low precision and noise do to its routing, and what to keep in float32.

    report = audit("org/model")
    report.verdict, report.metrics["kl@router bf16"], report.effect("router bf16").keep

The text is run clean and under every perturbation, batch by batch: each router by itself on clean
inputs (`LocalRuns`), and the whole model (`FullRuns`), where effects add up over depth. The
jump-weighted damage of layers on clean inputs adds up, D = Σ_l D_l, so the routers with the most
damage per byte are kept in float32 until the wanted share of D is gone; the KL of a run that keeps
them shows whether that holds when errors compound.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from tieline.analysis.joined_counts import join_full, join_local
from tieline.analysis.perturbations import (
    Perturbation,
    noise_generator,
    sigma_for_flips,
    standard_perturbations,
)
from tieline.analysis.precision_records import (
    KeepList,
    LayerEffect,
    NeverHit,
    PerturbationEffect,
    PrecisionAudit,
    PrecisionJudgement,
    RemedyTable,
)
from tieline.analysis.precision_runs import (
    SIGMA_TOKENS,
    FullEffect,
    FullRuns,
    LocalEffect,
    LocalRuns,
    clean_logits,
)
from tieline.analysis.remedies import RemedyRuns, chosen_perturbations
from tieline.analysis.sources import ModelSource, as_model
from tieline.analysis.streamed_audit import StreamedAudit, check_room
from tieline.core.errors import UnsupportedModelError, require
from tieline.core.statistics import Estimate, SequenceSums, mean_limits, next_token_losses
from tieline.models.capture import capture
from tieline.models.demo import DEMO
from tieline.models.emulate import FORMATS, format_named, makes_one_product, modular_routers
from tieline.models.ignore_lists import ignore_lists
from tieline.models.running import batches, forward, only_running
from tieline.models.spread import check_rounding
from tieline.models.streaming import ModelStream
from tieline.run.corpus import Text, TokenisedText, as_text, default_length, tokenise
from tieline.run.processes import Ranks
from tieline.trace.record import LayerTrace

Progress = Callable[[str, int, int], None]

LEAST_KL = 1e-14
"""Nats below which a KL is the rounding of its own sum."""

HARMLESS = 0.001
"""Nats per token by which a format may raise the loss and count as harmless."""

SPARE = 1.5
"""Flips aimed at, over those asked for: the number of them is random too."""

FOR_RUNS = 0.85
"""Part of the time that the main runs may take; the rest is for runs with kept layers."""


def audit(
    source: ModelSource = DEMO,
    *,
    text: Text = None,
    tokens: int = 16384,
    batch_size: int = 8,
    sequence_length: int | None = None,
    formats: Sequence[str] | None = None,
    perturbations: Sequence[Perturbation] | None = None,
    seed: int = 0,
    flips: int = 3000,
    recover: float = 0.9,
    remedies: Sequence[str] | None = None,
    budget_minutes: float | None = None,
    dtype: str = "fp32",
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    stream: bool | None = None,
    memory: int | None = None,
    keep: bool = True,
    parallel: str | None = None,
    progress: Progress | None = None,
) -> PrecisionAudit:
    """Measure what low precision and noise do to a model's routing, and what that costs.

    The model should run in float32: what its own precision already does is part of the clean run.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        text: what to run: a str, the Path of a file, or None for the text in the box.
        tokens: how many tokens of it. The KL is heavy-tailed: 16,384 are few enough.
        batch_size: sequences per forward pass.
        sequence_length: tokens per sequence; by default 512, or what the model takes if less.
        formats: number formats to round to, such as "bf16" or "int4_group"; by default all.
        perturbations: what to do instead of `standard_perturbations(formats)`.
        seed: seed of all noise.
        flips: Gaussian noise of the scores is drawn until it made so many layer-local flips.
        recover: share of the damage that the list of layers to keep in float32 shall recover.
        remedies: perturbations that remedies are tried on, by name; ("all",) for all, () for none;
            by default "router bf16", "model bf16" and "model int8", or all roundings without them.
        budget_minutes: begin nothing more after so many minutes, and record what was left out.
        dtype: precision to load a named model in.
        device: where to load it: "cpu", "cuda", "cuda:1", ... or "auto".
        revision: its branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with it may run.
        stream: whether its weights are read layer by layer, each byte once for all perturbations,
            instead of loaded; by default where they exceed the free memory. Runs that begin after
            the others, those with kept layers and the remedies, are then left out.
        memory: bytes of memory that a streamed model may take, by default what is free.
        keep: whether files that are fetched from the hub for a streamed model stay.
        parallel: how the processes of torchrun share the work: "data" or "ep" (`hf.spread`); all
            must call, and all get the result.
        progress: called with stage, done and total while the work goes on.
    """
    check_rounding(parallel, "an audit")
    require(
        parallel is None or budget_minutes is None,
        "budget_minutes goes by the clock of one process: leave it out on several",
    )
    require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
    require(0 < recover <= 1, f"recover is a share of the damage in (0, 1], got {recover}")
    limit = float("inf") if budget_minutes is None else 60 * budget_minutes
    require(limit > 0, f"budget_minutes must be positive, got {budget_minutes}")
    names = [format_named(name).name for name in formats or FORMATS]
    chosen = tuple(dict.fromkeys(perturbations or standard_perturbations(names)))
    repaired = chosen_perturbations(chosen, remedies)
    words, origin = as_text(text)
    options = {"device": device, "revision": revision, "trust_remote_code": trust_remote_code}
    options |= {"stream": stream, "memory": memory, "keep": keep, "copies": 2}
    loaded = as_model(source, "audit takes", dtype=dtype, parallel=parallel, **options)
    model, name = loaded.model, loaded.name
    length = sequence_length or default_length(model)
    tokenised = tokenise(loaded.tokenizer, words, tokens, length)
    parts = list(batches(tokenised.sequences, batch_size))
    share = Ranks.of(parallel, parts)
    with only_running(model):
        work = _Work(model, parts, share, chosen, seed, flips, limit, progress or _silent)
        if loaded.stream is None:
            work.run()
        else:
            _check_streamed(budget_minutes, remedies)
            work.stream(loaded.stream, memory)
        effects = work.with_keeps(work.rows(), recover)
        tried = work.remedies(effects, repaired)
    facts = {"source": origin, "characters": tokenised.characters, "sha256": _digest(tokenised)}
    settings = {"batch_size": batch_size, "sequence_length": length, "seed": seed, "flips": flips}
    named = {"model": name} if name else {}
    return replace(
        work.result(effects, {**named, "text": facts, **settings, **share.provenance()}),
        remedies=tried,
    )


def _check_streamed(budget_minutes: float | None, remedies: Sequence[str] | None) -> None:
    """Refuse what needs the whole model in memory, of a model that is read layer by layer."""
    require(
        budget_minutes is None,
        "a streamed audit has no result before its last layer: leave out budget_minutes",
    )
    require(not remedies, "remedies need the whole model in memory, and its weights are streamed")


class _Work:
    """One audit under way."""

    def __init__(
        self,
        model: nn.Module,
        parts: list[Any],
        share: Ranks,
        perturbations: tuple[Perturbation, ...],
        seed: int,
        flips: int,
        limit: float,
        progress: Progress,
    ) -> None:
        self._model, self._routers = model, modular_routers(model)
        perturbations, self._impossible = _possible(self._routers, perturbations)
        self._perturbations = list(perturbations)
        self._all, self._share, self._batches = parts, share, list(share.batches)
        self._tokens = sum(batch.numel() for batch in parts)
        calls = len(parts) * len(self._routers)
        self._local = LocalRuns(
            model,
            self._routers,
            [one.at_router for one in perturbations],
            seed,
            SPARE * flips / calls,
            max(1, self._tokens // SIGMA_TOKENS),
        )
        self._full = {one: FullEffect() for one in perturbations}
        self._loss, self._seed, self._progress = SequenceSums(), seed, progress
        self._start, self._limit, self._done = time.perf_counter(), limit, 0
        self._left_out: list[str] = []
        self._seconds: dict[str, float] = {}
        self._streamed = False

    def stream(self, stream: ModelStream, memory: int | None) -> None:
        """Run all batches, clean and perturbed, in one pass over the weights."""
        check_room(stream, self._tokens, 1 + 2 * len(self._perturbations), memory)
        parts = (self._routers, self._batches, self._local, self._full, self._seed)
        runs = StreamedAudit(stream, *parts)
        runs.run(partial(self._progress, "streaming"))
        self._loss, self._streamed = runs.loss, True
        self._seconds["runs"] = self._elapsed()

    def run(self) -> None:
        """Run every batch, clean and perturbed, as long as there is time."""
        slowest = 0.0
        for number, ids in enumerate(self._batches):
            began = self._elapsed()
            if number and began + slowest > FOR_RUNS * self._limit:
                left = sum(batch.numel() for batch in self._batches[number:])
                self._left_out.append(f"{left:,} of {self._tokens:,} tokens")
                self._all = self._batches = self._batches[:number]
                break
            self._run_batch(number, ids)
            slowest = max(slowest, self._elapsed() - began)
        join_local(self._share, self._local)
        join_full(self._share, self._full.values())
        self._share.join_sums([self._loss])
        self._seconds["runs"] = self._elapsed()

    def _run_batch(self, number: int, ids: Any) -> None:
        runs = self._clean(number, ids, watched=True)
        dropped = []
        for place, one in enumerate(self._perturbations):
            if number == 0 and place and self._elapsed() > FOR_RUNS * self._limit:
                dropped = self._perturbations[place:]
                break
            runs.add(self._full[one], one, self._source(place, number))
            self._tell()
        if dropped:
            self._left_out.append(f"perturbations {', '.join(one.name for one in dropped)}")
            self._perturbations = [one for one in self._perturbations if one not in dropped]

    def _clean(self, number: int, ids: Any, watched: bool) -> FullRuns:
        """The clean run of a batch, which perturbed ones are compared with."""
        if watched:
            with self._local.watching(self._share.number + number, *ids.shape):
                logits = clean_logits(forward(self._model, ids), ids)
            if ids.shape[1] > 1:
                self._loss.add(next_token_losses(logits, ids))
            self._tell()
        else:
            logits = clean_logits(forward(self._model, ids), ids)
        return FullRuns(self._model, self._routers, ids, dict(self._local.clean), logits)

    def _source(self, place: int, number: int) -> torch.Generator:
        """The noise of a perturbation in one of this process's batches."""
        return noise_generator(self._seed, place, self._share.number + number)

    def rows(self) -> list[PerturbationEffect]:
        """The rows of what was run."""
        return [
            perturbation_effect(
                one,
                {name: self._local.effects[one.at_router, name] for name in self._routers},
                self._full[one],
            )
            for one in self._perturbations
        ]

    def with_keeps(
        self, rows: list[PerturbationEffect], recover: float
    ) -> tuple[PerturbationEffect, ...]:
        """Add the layers to keep to the rows of rounded routers, and run those if there is time."""
        began = self._elapsed()
        lists = {
            one: self._keep_list(one, row, recover)
            for one, row in zip(self._perturbations, rows, strict=True)
            if one.kind == "rounding" and one.part == "router"
        }
        kls = {one: SequenceSums() for one, keep in lists.items() if self._worth_a_run(keep)}
        left = self._limit - began
        enough = not kls or self._seconds["runs"] * len(kls) / (2 * len(self._full)) < left
        if not enough or (kls and self._streamed):
            self._left_out.append("runs with the kept layers in float32")
            kls = {}
        for number, ids in enumerate(self._batches if kls else []):
            runs = self._clean(number, ids, watched=False)
            for one, sums in kls.items():
                source = self._source(self._perturbations.index(one), number)
                runs.kept(sums, one, source, lists[one].layers)
            self._progress("kept layers", number + 1, len(self._batches))
        self._share.join_sums(list(kls.values()))
        self._seconds["kept layers"] = self._elapsed() - began
        return tuple(
            replace(row, keep=_with_kl(lists[one], kls.get(one), row)) if one in lists else row
            for one, row in zip(self._perturbations, rows, strict=True)
        )

    def remedies(
        self, effects: Sequence[PerturbationEffect], wanted: Sequence[Perturbation]
    ) -> RemedyTable | None:
        """Try remedies on the perturbations wanted, as long as there is time."""
        began, slowest = self._elapsed(), 0.0
        places = {one: n for n, one in enumerate(self._perturbations) if one in wanted}
        if not places or began > self._limit or self._streamed:
            self._left_out += ["remedies"] if places else []
            return None
        keeps = {row.name: row.keep for row in effects if row.keep is not None}
        costs = {one.name: self._all_bytes(one) for one in places if one.kind == "rounding"}
        first = self._share.number
        runs = RemedyRuns(self._model, places, keeps, costs, self._all[0], self._seed, first)
        for number, ids in enumerate(self._batches):
            start = self._elapsed()
            if number and start + slowest > self._limit:
                self._left_out.append(f"remedies for {len(self._batches) - number} batches")
                break
            runs.batch(ids)
            slowest = max(slowest, self._elapsed() - start)
            self._progress("remedies", number + 1, len(self._batches))
        self._seconds["remedies"] = self._elapsed() - began
        runs.join(self._share)
        return runs.table()

    def _all_bytes(self, one: Perturbation) -> int:
        return sum(extra_bytes(router, str(one.level)) for router in self._routers.values())

    def _keep_list(self, one: Perturbation, row: PerturbationEffect, recover: float) -> KeepList:
        damages = {layer.name: layer.damage.value or 0.0 for layer in row.layers}
        costs = {n: extra_bytes(router, str(one.level)) for n, router in self._routers.items()}
        return keep_list(damages, costs, recover)

    def _worth_a_run(self, keep: KeepList) -> bool:
        return 0 < len(keep.layers) < len(self._routers)

    def result(
        self, effects: tuple[PerturbationEffect, ...], facts: dict[str, object]
    ) -> PrecisionAudit:
        """Assemble the result, with the noise of 1 % flips and the experts that were never hit."""
        began = self._elapsed()
        one_percent = sigma_for_flips(self._local.kept)
        self._seconds["one percent"] = self._elapsed() - began
        with capture(self._model) as recorder:
            known = recorder.provenance
        tokens = sum(batch.numel() for batch in self._all)
        return PrecisionAudit(
            judgement=judge(effects, sum(len(batch) for batch in self._all)),
            effects=effects,
            layers=tuple(self._routers),
            tokens=tokens,
            sequences=sum(len(batch) for batch in self._all),
            loss=self._loss.mean(),
            one_percent=one_percent,
            never_hit=self._never_hit(),
            left_out=tuple(self._left_out),
            impossible=self._impossible,
            experts=_experts(self._local.kept),
            ignore=ignore_lists(self._model),
            provenance={**known, **facts, "tokens": tokens},
            timings={**self._seconds, "total": self._elapsed()},
        )

    def _never_hit(self) -> tuple[NeverHit, ...]:
        found = []
        for name, hits in self._local.hits.items():
            experts = (hits == 0).nonzero().squeeze(1).tolist()
            if experts:
                found.append(NeverHit(name, tuple(experts), len(hits)))
        return tuple(found)

    def _tell(self) -> None:
        self._done += 1
        total = len(self._batches) * (1 + len(self._perturbations))
        self._progress("audit", min(self._done, total), total)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start


def _experts(kept: Mapping[str, list[LayerTrace]]) -> float | None:
    """Experts in use per token, mean over layers; None if no layer is smoothed."""
    means = []
    for parts in kept.values():
        used = [part.used.double() for part in parts if part.used is not None]
        means.append(torch.cat(used).mean().item() if used else float(parts[0].facts.k))
    smoothed = any(part.smoothed for parts in kept.values() for part in parts)
    return sum(means) / len(means) if smoothed else None


def _possible(
    routers: Mapping[str, nn.Module], perturbations: tuple[Perturbation, ...]
) -> tuple[tuple[Perturbation, ...], str]:
    """The perturbations that these routers allow, and why not the others, in words."""
    other = [name for name, router in routers.items() if not makes_one_product(router)]
    refused = [one.name for one in perturbations if one.kind == "score noise"] if other else []
    if not refused:
        return perturbations, ""
    words = (
        f"{', '.join(refused)}: noise is added to one product of router and input, and the logits "
        f"of layer {other[0]!r} are none"
    )
    kept = tuple(one for one in perturbations if one.name not in refused)
    require(bool(kept), f"nothing is left to run without {words}", UnsupportedModelError)
    return kept, words


def _with_kl(keep: KeepList, sums: SequenceSums | None, row: PerturbationEffect) -> KeepList:
    """Add the KL that remains; it is zero where every router is kept."""
    every = len(keep.layers) == len(row.layers)
    kl = Estimate(0.0, 0.0) if every else None if sums is None else sums.mean()
    if kl is None or kl.value is None or not row.kl.value:
        return replace(keep, kl=kl)
    return replace(keep, kl=kl, recovered_kl=1 - kl.value / row.kl.value)


def _digest(text: TokenisedText) -> str:
    return hashlib.sha256("".join(text.pieces).encode(errors="surrogatepass")).hexdigest()


def _silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def perturbation_effect(
    perturbation: Perturbation, local: Mapping[str, LocalEffect], full: FullEffect
) -> PerturbationEffect:
    """Assemble the row of one perturbation.

    Args:
        perturbation: what was done.
        local: what it does to each router by itself, by name.
        full: what it does in a full run.
    """
    layers = tuple(_layer(name, effect, full) for name, effect in local.items())
    flips = SequenceSums().joined(*(effect.flips for effect in local.values())).mean()
    everywhere = SequenceSums().joined(*full.flips.values()).mean()
    kl, floor = full.kl.mean(), full.floor.mean()
    return PerturbationEffect(
        name=perturbation.name,
        kind=perturbation.kind,
        level=perturbation.level,
        part=perturbation.part,
        local=flips,
        local_flips=sum(effect.seen for effect in local.values()),
        predicted=_mean([layer.predicted for layer in layers]),
        predicted_low=_mean([layer.predicted_low for layer in layers]),
        full=everywhere,
        any_layer=full.any_layer.mean(),
        compounding=_ratio(everywhere, flips),
        moved=full.moved.mean(),
        moved_p99=_quantile(torch.cat(full.shares), 0.99) if full.shares else None,
        damage=SequenceSums().joined(*(effect.damage for effect in local.values())).mean(),
        loss=full.loss.mean(),
        kl=kl,
        kl_floor=floor,
        by_flips=_gone(kl, floor),
        layers=layers,
    )


def _layer(name: str, effect: LocalEffect, full: FullEffect) -> LayerEffect:
    tokens = sum(int(count.sum()) for count in effect.flips.counts)
    return LayerEffect(
        name=name,
        local=effect.flips.mean(),
        local_flips=effect.seen,
        repeats=effect.trials / tokens,
        predicted=effect.high.mean().value,
        predicted_low=effect.low.mean().value,
        full=full.flips.get(name, SequenceSums()).mean(),
        damage=effect.damage.mean(),
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _ratio(above: Estimate, below: Estimate) -> float | None:
    if above.value is None or not below.value:
        return None
    return above.value / below.value


def _gone(kl: Estimate, floor: Estimate) -> float | None:
    """1 - floor / KL; None where the KL is rounding."""
    if kl.value is None or floor.value is None or kl.value < LEAST_KL:
        return None
    return 1 - floor.value / kl.value


def _quantile(values: torch.Tensor, level: float) -> float:
    place = min(len(values) - 1, int(level * len(values)))
    return values.sort().values[place].item()


def extra_bytes(router: nn.Module, number_format: str) -> int:
    """Return the bytes that the router's weights take in float32 beyond those of the format."""
    bits = 32 - format_named(number_format).bits
    return sum(weight.numel() for weight in router.parameters()) * bits // 8


def keep_list(damages: Mapping[str, float], costs: Mapping[str, int], wanted: float) -> KeepList:
    """Choose routers by damage per byte until their damage is at least `wanted` of the whole.

    Args:
        damages: jump-weighted damage D_l >= 0 of each layer.
        costs: bytes to keep each layer's router in float32.
        wanted: share of the damage to recover, in (0, 1].
    """
    require(0 < wanted <= 1, f"the share of damage to recover is in (0, 1], got {wanted}")
    whole = sum(damages.values())
    order = sorted(damages, key=lambda name: damages[name] / max(1, costs[name]), reverse=True)
    kept: list[str] = []
    gone = 0.0
    for name in order:
        if gone >= wanted * whole * (1 - 1e-12) or damages[name] <= 0:
            break
        kept.append(name)
        gone += damages[name]
    return KeepList(
        wanted=wanted,
        layers=tuple(kept),
        recovered=gone / whole if whole > 0 else 0.0,
        bytes=sum(costs[name] for name in kept),
        bytes_all=sum(costs.values()),
    )


Tolerance = Literal["yes", "no", "unclear"]


def tolerated(kl: Estimate, loss: Estimate, sequences: int) -> Tolerance:
    """Whether the rise of the loss and the KL are below `HARMLESS`, as far as intervals can tell.

    Args:
        kl: KL to the clean run, clustered by sequence.
        loss: change of the loss, likewise.
        sequences: clusters of their standard errors.
    """
    limits = [mean_limits(kl, sequences, positive=True), mean_limits(loss, sequences)]
    if any(low >= HARMLESS for low, _ in limits):
        return "no"
    return "yes" if all(high < HARMLESS for _, high in limits) else "unclear"


def judge(rows: Sequence[PerturbationEffect], sequences: int) -> PrecisionJudgement:
    """Judge which formats the routers tolerate, and which run shows where damage comes from.

    Args:
        rows: what was run.
        sequences: clusters of the standard errors.
    """
    routers = [row for row in rows if row.kind == "rounding" and row.part == "router"]
    if not routers:
        return PrecisionJudgement("not run")
    sorted_rows = {
        tolerance: [row for row in routers if tolerated(row.kl, row.loss, sequences) == tolerance]
        for tolerance in get_args(Tolerance)
    }
    good, bad, unclear = (sorted_rows[tolerance] for tolerance in ("yes", "no", "unclear"))
    model = [row for row in rows if row.part == "model" and row.kind == "rounding"]
    model.sort(key=lambda row: row.level != "bf16")
    smallest = min(
        good, key=lambda row: (FORMATS[str(row.level)].bits, row.kl.value or 0.0), default=None
    )
    worst = max(bad, key=lambda row: row.kl.value or 0.0, default=None)
    return PrecisionJudgement(
        kind="none" if not good else "some" if bad or unclear else "all",
        tolerated=tuple(row.name for row in good),
        refused=tuple(row.name for row in bad),
        unclear=tuple(row.name for row in unclear),
        smallest=smallest and smallest.name,
        worst=worst and worst.name,
        whole_model=model[0].name if model and model[0].compounding is not None else None,
        limit=HARMLESS,
    )
