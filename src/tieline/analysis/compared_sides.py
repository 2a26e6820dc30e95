"""The sides of a comparison: as the caller named them, as models that run, and run again soundly.

NamedSide     a trace, file, model or engine as the caller named it, with its settings
ModelSide     a model as it is or in an emulated number format
trace_model   the routing of a model on some sequences
sound_runs    runs of a model in a format: what its noise is measured by

The model runs again in the expected format, emulated by rounding, on up to 4,096 tokens, in ways
that engines differ in and that leave its function alone:

    plain       the batches of the comparison
    attention   the other of the implementations "eager" and "sdpa", where the model has both, two
                sequences at a time: the matrices of attention stay small
    padding     three sequences at a time, 24 more tokens after each, which causal attention does
                not look at
    seed        noise on embeddings and states of the size of the format's own rounding, drawn anew
                until there are five runs

In float32 the last digits differ by the order of sums alone; there, noise of 2⁻²⁴ is drawn.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.analysis.attribution import Expected, recorded_format
from tieline.analysis.route_files import saved_routes, source_kind
from tieline.analysis.token_distances import DistanceObserver, TokenDistances
from tieline.core.errors import UnsupportedModelError, require
from tieline.core.setting_fields import require_setting
from tieline.engines.engine_registry import split_side
from tieline.models.emulate import Region
from tieline.models.experts import use_experts
from tieline.models.model import Model
from tieline.models.model_stream import ModelStream
from tieline.models.number_formats import FORMATS
from tieline.run.condition import CLEAN, Condition, Perturbation, rounding_noise
from tieline.run.corpus import stacked_batches
from tieline.run.observers import Observer, RouteRecorder, RoutersAlone
from tieline.run.plan import Logits, Pass, Phase, Plan
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, Runner
from tieline.trace.record import RoutingTrace
from tieline.trace.selection import select_tokens

EMULATED = "-emulated"
"""End of the names of dtypes that are emulated by rounding."""


class ModelSide(NamedTuple):
    """A model to run, as it is or in an emulated number format.

    Attributes:
        model: a Mixture-of-Experts model of transformers.
        emulated: name in `models.emulate.FORMATS` of a format that is emulated by rounding; the
            model must be in float32 then.
        region: what is in that format: "all", "router" or "others".
        stream: reads the weights when they are needed; None if they are in memory.
        tokenizer: its tokenizer, where text is to be cut.
        changes: how it runs, where no format says it.
    """

    model: nn.Module
    emulated: str | None = None
    region: Region = "all"
    stream: ModelStream | None = None
    tokenizer: Any = None
    changes: Condition | None = None

    @property
    def opened(self) -> Model:
        """The model as the runner takes it."""
        return Model(self.model, stream=self.stream)

    @property
    def condition(self) -> Condition:
        """How it runs."""
        if self.changes is not None:
            return self.changes
        if self.emulated is None:
            return CLEAN
        part = "model" if self.region == "all" else self.region
        return Condition(Perturbation("rounding", self.emulated, part))

    def recorder(self, number: int = 0) -> RouteRecorder:
        """Records the passes of this side, the model of that number in its plan."""
        name = self.emulated if self.region == "all" else f"{self.emulated} {self.region}"
        facts = {} if self.emulated is None else {"emulated": name}
        return RouteRecorder(self.model, of=lambda run: run.model == number, provenance=facts)


def trace_side(
    side: ModelSide,
    ranks: Ranks,
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
    logits: Logits = "optional",
) -> RoutingTrace:
    """Run batches through one model, and return their routing.

    Args:
        side: the model.
        ranks: the batches, and how processes share them.
        observers: what else looks at the passes.
        progress: called with stage, done and total.
        logits: whether these look at logits; nothing else does.
    """
    recorder = side.recorder()
    passes = tuple(Pass(n, side.condition) for n in ranks.numbered)
    logits = logits if observers else "none"
    plan = Plan((Phase("forward", ranks.numbered, passes, logits=logits),))
    Runner(side.opened, ranks=ranks).run(plan, [recorder, *observers], progress)
    return recorder.trace()


def trace_model(
    side: ModelSide,
    sequences: Sequence[Int[Tensor, " _"]],
    *,
    documents: Sequence[int] | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
    parallel: str | None = None,
) -> RoutingTrace:
    """Record the routing of one model on these sequences.

    Args:
        side: the model.
        sequences: token ids.
        documents: number of each sequence as a document; 0, 1, ... by default.
        batch_size: sequences per forward pass.
        progress: called with stage, done and total.
        parallel: how processes share the model, which was loaded so.
    """
    ranks = Ranks.of(parallel, list(stacked_batches(sequences, batch_size)))
    trace = trace_side(side, ranks, progress=progress)
    return trace if documents is None else renumbered_documents(trace, documents)


def renumbered_documents(trace: RoutingTrace, documents: Sequence[int]) -> RoutingTrace:
    """The trace with other numbers for its documents 0, 1, ...."""
    return replace(trace, documents=torch.tensor(documents, device="cpu")[trace.documents.long()])


class NamedSide(NamedTuple):
    """One side as the caller named it, with its settings."""

    side: str
    source: Any
    dtype: str
    experts: str | None
    revision: str | None
    load: dict[str, Any]

    @property
    def kind(self) -> str:
        """What the side is: "engine", "model", "trace", "file" or "result"."""
        if split_side(self.source) is not None:
            return "engine"
        if isinstance(self.source, str | Path):
            return source_kind(self.source)
        return "trace" if isinstance(self.source, RoutingTrace) else "model"

    def checked_kind(self) -> str:
        """The kind, refused if it is no run or has settings of models without being one."""
        read_dtype(self.dtype)
        kind, settings = self.kind, (self.dtype, self.experts, self.revision)
        require(kind != "result", f"{self.source} is a saved result: diff takes traces and models")
        end = self.side.lower()
        if kind == "engine":
            require_setting(
                settings[1:] == (None, None),
                f"{{experts_impl_{end}}} and {{revision_{end}}} are for models, not engines",
            )
            return kind
        require_setting(
            kind == "model" or settings == ("auto", None, None),
            f"{{dtype_{end}}}, {{experts_impl_{end}}} and {{revision_{end}}} are for models, and "
            "{source} is a {kind}",
            source=f"{self.source!s:.80}",
            kind=kind,
        )
        return kind

    def trace(self, n_experts: int | None, k: int | None) -> RoutingTrace:
        """The saved run."""
        if isinstance(self.source, RoutingTrace):
            return self.source
        return saved_routes(self.source, n_experts, k)

    def opened(self) -> ModelSide:
        """The model, ready to run."""
        dtype, emulated = read_dtype(self.dtype)
        is_name = isinstance(self.source, str | Path)
        require_setting(
            is_name or emulated is not None or dtype == "auto",
            f"{{dtype_{self.side.lower()}}} {dtype!r} is for a model that is loaded by its name",
        )
        options = {"dtype": dtype, "revision": self.revision, **self.load}
        model = Model.open(self.source, "diff takes a trace, a file of routes, or", **options)
        use_experts(model.module, self.experts)
        return ModelSide(model.module, emulated, stream=model.stream, tokenizer=model.tokenizer)

    @property
    def provenance(self) -> dict[str, object]:
        """The name of the side, for the record."""
        if not isinstance(self.source, str | Path):
            return {}
        is_model = self.kind in ("model", "engine")
        return {"model" if is_model else "file": str(self.source)}


def read_dtype(dtype: str) -> tuple[str, str | None]:
    """Return the dtype to load a model in, and the format to emulate in it, if any."""
    if not dtype.endswith(EMULATED):
        return dtype, None
    name = dtype.removesuffix(EMULATED)
    names = ", ".join(f"{format_name}{EMULATED}" for format_name in FORMATS)
    require(name in FORMATS, f"no format {dtype!r}: emulated are {names}")
    return "fp32", name


REFERENCE_TOKENS = 4096
"""Tokens on which a model runs once more in the format that is expected."""
FEWEST_RUNS = 5
SMALL_BATCH = 3
ATTENTION_BATCH = 2
"""Sequences per pass of the other attention, which may hold matrices of all pairs of tokens."""
PADDING = 24
"""Tokens that are added to each sequence."""
FLOAT32_NOISE = 2.0**-24
"""Noise over the root mean square of states that other sums in float32 make."""
IMPLEMENTATIONS = {"eager": "sdpa", "sdpa": "eager"}
ALL: Region = "all"
Sequences = Sequence[Int[Tensor, " _"]]


def sound_runs(
    sides: Sequence[ModelSide],
    traces: Sequence[RoutingTrace],
    sequences: Sequences,
    expected: Expected | None,
    batch_size: int,
    asked_region: Region | None = None,
    predictions: DistanceObserver | None = None,
    plain: RoutingTrace | None = None,
) -> list[RoutingTrace]:
    """Return runs of a model in the expected format, next to its own run in float32.

    Empty where nothing is expected, nothing can be emulated, or no model runs in float32.

    Args:
        sides: the models.
        traces: their own runs.
        sequences: token ids.
        expected: the format.
        batch_size: sequences per forward pass.
        asked_region: what is in that format; by default what a side emulates in it, else all.
        predictions: compares the predictions of the plain run with those in float32, which then
            run again.
        plain: the plain run, where it was recorded before (`recorded_plain_run`).
    """
    exact = [
        side
        for side, trace in zip(sides, traces, strict=True)
        if recorded_format(trace.provenance) == "fp32"
    ]
    if expected is None or expected.name not in ("fp32", *FORMATS) or not exact:
        return []
    first = _first_sequences(sequences)
    emulated: list[Region] = [side.region for side in sides if side.emulated == expected.name]
    region = asked_region or (*emulated, ALL)[0]
    try:
        run = (exact[0], expected.name, region, first, batch_size, predictions)
        return _runs_in_format(*run, plain)
    except UnsupportedModelError:  # routers that cannot be emulated apart
        return []


def _first_sequences(sequences: Sequences) -> Sequences:
    """The sequences that the model runs again, those of the first 4,096 tokens."""
    lengths = np.cumsum([len(sequence) for sequence in sequences])
    return sequences[: max(1, int(np.searchsorted(lengths, REFERENCE_TOKENS, side="right")))]


def recorded_plain_run(
    sides: tuple[ModelSide, ModelSide],
    traces: Sequence[RoutingTrace],
    distances: Sequence[TokenDistances],
    sequences: Sequences,
    expected: Expected | None,
    batch_size: int,
) -> tuple[RoutingTrace, TokenDistances] | None:
    """Return the plain run and its distances to float32 if the compared runs contain them.

    They do where A is the model in float32 and B the same object in the expected format, and where
    the first 4,096 tokens are in batches of their own. None elsewhere.

    Args:
        sides: A and B, run in batches of the same size.
        traces: their runs.
        distances: of their predictions, batch by batch.
        sequences: token ids.
        expected: the format.
        batch_size: sequences per forward pass.
    """
    a, b = sides
    is_exact = a.condition == CLEAN and recorded_format(traces[0].provenance) == "fp32"
    if expected is None or b.emulated != expected.name or b.model is not a.model or not is_exact:
        return None
    first = _first_sequences(sequences)
    first_batches, batches = (list(stacked_batches(x, batch_size)) for x in (first, sequences))
    if not distances or any(
        x.shape != y.shape for x, y in zip(first_batches, batches, strict=False)
    ):
        return None
    tokens = slice(sum(map(len, first)))
    columns = zip(*distances, strict=True)
    joined = TokenDistances(*(torch.cat(column)[tokens] for column in columns))
    return select_tokens(traces[1], tokens), joined


def _runs_in_format(
    exact: ModelSide,
    format_name: str,
    region: Region,
    sequences: Sequences,
    batch_size: int,
    predictions: DistanceObserver | None,
    plain: RoutingTrace | None,
) -> list[RoutingTrace]:
    """The runs of the table above, but for the attention that a model lacks."""
    name = None if format_name == "fp32" else format_name
    side = ModelSide(exact.model, name, region)
    runs = []
    if name is not None and plain is not None:
        runs.append(plain)
    elif name is not None and predictions is not None:
        runs.append(_trace_with_predictions(exact, side, sequences, batch_size, predictions))
    elif name is not None:
        runs.append(_routes(side, sequences, batch_size))
    with _other_attention(exact.model) as is_other:
        if is_other:
            size = min(batch_size, ATTENTION_BATCH)
            runs.append(_routes(side, sequences, size))
    padded = [torch.cat((x, x[:1].expand(PADDING))) for x in sequences]
    trace = _routes(side, padded, SMALL_BATCH)
    lengths = torch.tensor([len(x) for x in sequences], device="cpu")
    is_original = trace.positions.long() < lengths[trace.documents.long()]
    runs.append(select_tokens(trace, is_original.nonzero().flatten()))
    for seed in range(FEWEST_RUNS - len(runs)):
        noisy_side = side._replace(changes=_with_seeded_noise(side.condition, seed))
        ratio = FLOAT32_NOISE if name is None else rounding_noise(name)
        with _noisy_embeddings(exact.model, ratio, seed):
            runs.append(_routes(noisy_side, sequences, batch_size))
    return runs


def _routes(side: ModelSide, sequences: Sequences, batch_size: int) -> RoutingTrace:
    """The routing of a model that has run whole before; what follows its routers is not run."""
    ranks = Ranks.of(None, list(stacked_batches(sequences, batch_size)))
    return trace_side(side, ranks, [RoutersAlone(side.model)], logits="none")


@contextmanager
def _noisy_embeddings(model: nn.Module, ratio: float, seed: int) -> Iterator[None]:
    """Noise of `ratio` times the root mean square of each embedded token."""
    generator = torch.Generator().manual_seed(seed)
    embed: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if embed is None:
        yield
        return

    def add_noise(module: nn.Module, args: object, output: Tensor) -> Tensor:
        """Return the embeddings with fresh noise."""
        noise = torch.randn(output.shape, generator=generator, device=generator.device).to(output)
        return output + ratio * output.square().mean(-1, keepdim=True).sqrt() * noise

    handle = embed.register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


def _with_seeded_noise(condition: Condition, seed: int) -> Condition:
    """The condition with noise of the size of its last digits."""
    if condition.perturbation is None:
        noise = Perturbation("state noise", FLOAT32_NOISE, "model")
        return Condition(noise, seed=(seed,))
    return Condition(condition.perturbation, draw=1, seed=(seed,))


@contextmanager
def _other_attention(model: nn.Module) -> Iterator[bool]:
    """Run with the other implementation of attention; gives whether the model has it."""
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    switch: Any = getattr(model, "set_attn_implementation", None)
    other = IMPLEMENTATIONS.get(str(implementation))
    if other is None or switch is None:
        yield False
        return
    try:
        switch(other)
    except ValueError:  # transformers refuses what a model does not support
        yield False
        return
    try:
        yield True
    finally:
        switch(implementation)


def _trace_with_predictions(
    exact: ModelSide,
    side: ModelSide,
    sequences: Sequences,
    batch_size: int,
    predictions: DistanceObserver,
) -> RoutingTrace:
    """Record the routing of a model in a format, and compare its predictions with its own."""
    ranks = Ranks.of(None, list(stacked_batches(sequences, batch_size)))
    firsts = [Pass(n, exact.condition) for n in ranks.numbered]
    seconds = [Pass(first.batch, side.condition, first, model=1) for first in firsts]
    plan = Plan((Phase("forward", ranks.numbered, (*firsts, *seconds), logits="optional"),))
    recorder = side.recorder(1)
    Runner(exact.opened, side.opened, ranks=ranks).run(plan, [recorder, predictions])
    return recorder.trace()
