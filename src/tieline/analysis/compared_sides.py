"""The sides of a comparison: as the caller named them, and as models that run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.analysis.route_files import load_routes, source_kind
from tieline.core.errors import TraceError, require
from tieline.core.setting_fields import require_setting
from tieline.engines.engine_registry import split_engine_source
from tieline.models.emulate import Region
from tieline.models.experts import use_experts
from tieline.models.model import Model
from tieline.models.model_stream import ModelStream
from tieline.models.number_formats import FORMATS
from tieline.run.condition import CLEAN, Condition, Perturbation
from tieline.run.corpus import stacked_batches
from tieline.run.observers import Observer, RouteRecorder
from tieline.run.plan import Logits, Pass, Phase, Plan
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, Runner
from tieline.trace.record import RoutingTrace

EMULATED = "-emulated"
"""Suffix of the dtypes that are emulated by rounding."""


class ModelSide(NamedTuple):
    """A model to run, as it is or in an emulated number format.

    Attributes:
        model: a Mixture-of-Experts model of transformers.
        emulated: name in `models.emulate.FORMATS` of a format that is emulated by rounding, which
            needs a model in float32.
        region: region of the model in that format: "all", "router" or "others".
        stream: reads the weights when they are needed; None if they are in memory.
        tokenizer: its tokenizer, if text is to be tokenised.
        own_condition: the condition of its passes, if it is not that of the format.
    """

    model: nn.Module
    emulated: str | None = None
    region: Region = "all"
    stream: ModelStream | None = None
    tokenizer: Any = None
    own_condition: Condition | None = None

    @property
    def runner_model(self) -> Model:
        """The model in the form that `Runner` takes."""
        return Model(self.model, stream=self.stream)

    @property
    def condition(self) -> Condition:
        """The condition of its passes."""
        if self.own_condition is not None:
            return self.own_condition
        if self.emulated is None:
            return CLEAN
        part = "model" if self.region == "all" else self.region
        return Condition(Perturbation("rounding", self.emulated, part))

    def recorder(self, number: int = 0) -> RouteRecorder:
        """Recorder of the passes of this side, the model of that number in the plan."""
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
    """Run batches through one model and record their routing.

    Args:
        side: the model.
        ranks: the batches, and how processes share them.
        observers: further observers of the passes.
        progress: called with stage, done and total.
        logits: whether these observers need logits.
    """
    recorder = side.recorder()
    passes = tuple(Pass(n, side.condition) for n in ranks.numbered)
    logits = logits if observers else "none"
    plan = Plan((Phase("forward", ranks.numbered, passes, logits=logits),))
    Runner(side.runner_model, ranks=ranks).run(plan, [recorder, *observers], progress)
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
        parallel: how processes share the model, which was loaded for it.
    """
    ranks = Ranks.share_batches(parallel, list(stacked_batches(sequences, batch_size)))
    trace = trace_side(side, ranks, progress=progress)
    return trace if documents is None else renumbered_documents(trace, documents)


def renumbered_documents(trace: RoutingTrace, documents: Sequence[int]) -> RoutingTrace:
    """The trace with these numbers for its documents 0, 1, ...."""
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
        """Kind of the side: "engine", "model", "trace", "file" or "result"."""
        if split_engine_source(self.source) is not None:
            return "engine"
        if isinstance(self.source, str | Path):
            return source_kind(self.source)
        return "trace" if isinstance(self.source, RoutingTrace) else "model"

    def checked_kind(self) -> str:
        """The kind; raises if it is not a run, or has settings that it does not take."""
        split_dtype(self.dtype)
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
        return load_routes(self.source, n_experts, k)

    def open_model(self) -> ModelSide:
        """Load the model."""
        dtype, emulated = split_dtype(self.dtype)
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
        """The name of the model or file, as provenance."""
        if not isinstance(self.source, str | Path):
            return {}
        is_model = self.kind in ("model", "engine")
        return {"model" if is_model else "file": str(self.source)}


def split_dtype(dtype: str) -> tuple[str, str | None]:
    """The dtype to load a model in, and the format to emulate in it, if any."""
    if not dtype.endswith(EMULATED):
        return dtype, None
    name = dtype.removesuffix(EMULATED)
    names = ", ".join(f"{format_name}{EMULATED}" for format_name in FORMATS)
    require(name in FORMATS, f"no format {dtype!r}: emulated are {names}")
    return "fp32", name


def check_vocabulary(model: nn.Module, sequences: Sequence[Int[Tensor, " _"]]) -> None:
    """Raise if a token id is beyond the input embeddings of the model."""
    embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(embeddings, "num_embeddings", None)
    largest = max((int(ids.max()) for ids in sequences if ids.numel()), default=0)
    require(
        size is None or largest < size,
        f"token id {largest} is not one of the model's {size}: ids of another tokenizer?",
        TraceError,
    )


def check_same_tokens(a: Sequence[Int[Tensor, " _"]], b: Sequence[Int[Tensor, " _"]]) -> None:
    """Raise if the sequences differ; the error names the first difference."""
    for number, (first, second) in enumerate(zip(a, b, strict=False)):
        for position, (x, y) in enumerate(zip(first.tolist(), second.tolist(), strict=False)):
            _require_same_tokenisation(f"sequence {number}, token {position} is", x, y)
        _require_same_tokenisation(f"sequence {number} has", len(first), len(second), " tokens")
    _require_same_tokenisation("the text has", len(a), len(b), " sequences")


def _require_same_tokenisation(quantity: str, a: int, b: int, unit: str = "") -> None:
    """Raise if a count or token id differs between the sides."""
    require(a == b, f"different tokenisations: {quantity} {a}{unit} in A, {b} in B", TraceError)
