"""Check files of routes: by themselves, against their tokens, a second file, or a model.

A model routes a sample of the file's tokens, and the finding names the fault that explains a
disagreement. The tests and their reasons are in `trace.soundness`, `trace.repetition`,
`trace.token_fit` and `trace.reference_agreement`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import torch

from tieline.analysis.compared_sides import check_vocabulary
from tieline.analysis.job_settings import CheckOptions, CheckSettings
from tieline.core.errors import ParameterError, TraceError, require
from tieline.core.records import Result
from tieline.core.setting_fields import SettingError, takes_settings
from tieline.models.model import Model
from tieline.run.ranks import Ranks
from tieline.run.runner import recorded_routes
from tieline.trace.readers import ReadOptions, Routes, read_routes, routes_of_trace
from tieline.trace.readers.route_formats import token_documents
from tieline.trace.record import MOST_EXPERTS, RoutingTrace
from tieline.trace.reference_agreement import agreement_findings
from tieline.trace.repetition import repetition_findings
from tieline.trace.route_table import route_table
from tieline.trace.soundness import LEAST_COPIES, RouteFinding, soundness_findings
from tieline.trace.store import load_trace
from tieline.trace.token_fit import token_fit_findings

SAMPLE_TOKENS = 2048
"""Tokens of a file that a model routes for comparison."""
LEAST_SAMPLED = 32
"""Fewest tokens of each document that it routes, which distinguish the documents."""


@dataclass(frozen=True)
class CheckedFile:
    """One checked file.

    Attributes:
        name: name of the file.
        producer: name of its format.
        rows: number of rows of the array.
        documents: number of documents of the rows.
        layers: number of layers of the array.
        routed: number of layers in which tokens were routed.
        k: experts per token.
        n_experts: number of experts, as given or as the ids show.
        dtype: dtype of the ids.
        said: notes of the reader on what it found and assumed.
        has_tokens: whether the token ids of the rows are known.
    """

    name: str
    producer: str
    rows: int
    documents: int
    layers: int
    routed: int
    k: int
    n_experts: int
    dtype: str
    said: tuple[str, ...]
    has_tokens: bool = False


@dataclass(frozen=True, repr=False)
class RouteCheck(Result):
    """Result of a check of files of routes: all findings, and what was compared.

    Attributes:
        verdict: whether the files are sound, in a sentence.
        sound: whether there is no finding that excludes a sound run.
        files: the checked files.
        findings: the findings, most severe first.
        model: name of the model that routed a sample, if one was given.
        reference: name of the second file, if one was given.
        compared: number of tokens that were compared with the model.
    """

    format: ClassVar[str] = "tieline-check"
    sentences: ClassVar[tuple[str, ...]] = ("verdict",)

    sound: bool
    files: tuple[CheckedFile, ...]
    findings: tuple[RouteFinding, ...]
    model: str | None = None
    reference: str | None = None
    compared: int = 0

    def __post_init__(self) -> None:
        require(len(self.files) > 0, "a check is of at least one file", TraceError)

    @property
    def verdict(self) -> str:
        """Return a sentence on whether the files are sound."""
        return self.sentence("verdict")

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "sound", the number of findings of each severity, files and rows."""
        counts = {name: self.count(name) for name in ("unsound", "suspicious", "note")}
        rows = sum(file.rows for file in self.files)
        numbers = {"sound": int(self.sound)} | counts | {"files": len(self.files), "rows": rows}
        return {name: float(value) for name, value in numbers.items()}

    def count(self, severity: str) -> int:
        """Number of findings of a severity: "unsound", "suspicious" or "note"."""
        return sum(finding.severity == severity for finding in self.findings)


@takes_settings(CheckSettings)
def check(
    routes: Any, *, settings: CheckSettings | None = None, **options: Unpack[CheckOptions]
) -> RouteCheck:
    """Check whether files of routes are sound.

    Args:
        routes: a file, a folder of a trace or of Megatron, an array (tokens, layers, k), an answer
            of an engine, or a list of paths.
        settings: the options; keyword arguments change single ones. `model` may also be
            `(model, tokenizer)`; a sample is routed by it and compared, which needs token ids, in
            the file or by `tokens`. `tokens` may also be an array (tokens,) or
            (documents, length), or a list of arrays.
    """
    settings = CheckSettings.of(settings, options)
    n_experts, model, against = settings.n_experts, settings.model, settings.against
    several = isinstance(routes, list | tuple) and all(isinstance(x, str | Path) for x in routes)
    sources = list(routes) if several else [routes]
    require(bool(sources), "check takes at least one file, got none")
    tokens = token_documents(settings.tokens)
    reading = ReadOptions(**{**settings.import_arguments, "tokens": tokens})
    read = [_read_source(source, reading) for source in sources]
    other = None if against is None else _read_source(against, reading)
    loaded = None if model is None else Model.open(model, "check takes", device=settings.device)
    all_findings, compared = [], 0
    for source_routes in read:
        own_findings = _file_findings(source_routes, n_experts)
        if other is not None:
            own_findings += agreement_findings(source_routes, other, n_experts)
        if loaded is not None:
            own_findings, count = _model_findings(source_routes, own_findings, loaded.module)
            compared += count
        own_findings = _unexplained_findings(own_findings)
        all_findings += [replace(finding, file=source_routes.name) for finding in own_findings]
    order = ("unsound", "suspicious", "note")
    all_findings.sort(key=lambda finding: order.index(finding.severity))
    return RouteCheck(
        sound=all(finding.severity != "unsound" for finding in all_findings),
        files=tuple(_checked_file(source_routes, n_experts) for source_routes in read),
        findings=tuple(all_findings),
        model=None if loaded is None else loaded.name or type(loaded.module).__name__,
        reference=None if other is None else other.name,
        compared=compared,
    )


def _file_findings(routes: Routes, n_experts: int | None) -> list[RouteFinding]:
    """Findings in the routes by themselves; repeated rows are reported once, by likely cause."""
    repeated = repetition_findings(routes, n_experts)
    names_repeats = any(finding.kind == "repeated-rows" for finding in repeated)
    own_findings = soundness_findings(routes, n_experts)
    if any(finding.case in ("all-ids", "no-layer") for finding in own_findings):
        return own_findings
    unrepeated = [x for x in own_findings if not (names_repeats and x.kind == "repeated-rows")]
    return unrepeated + repeated + token_fit_findings(routes, n_experts)


def _unexplained_findings(own_findings: list[RouteFinding]) -> list[RouteFinding]:
    """Findings without scattered copies of a row for different tokens, if the tokens are others."""
    if not any(x.kind == "token-shift" and x.severity == "unsound" for x in own_findings):
        return own_findings
    return [
        x
        for x in own_findings
        if x.case != "copies" or x.reason != "stale-row" or x.evidence["run"] >= LEAST_COPIES
    ]


def _read_source(source: Any, options: ReadOptions) -> Routes:
    """Routes of a source of any kind; raises on ids beyond any model's experts."""
    if isinstance(source, str | Path) and (Path(source) / "tieline.json").is_file():
        return routes_of_trace(load_trace(source), str(source))
    if isinstance(source, str | Path):
        require(Path(source).exists(), f"no such file or folder: {source}", TraceError)
    elif not isinstance(source, RoutingTrace | Routes | dict | list | np.ndarray | torch.Tensor):
        kind = type(source).__name__
        readable = any(hasattr(source, name) for name in ("outputs", "choices", "routed_experts"))
        require(readable, f"check takes a path, an array or an answer of an engine, got {kind}")
    routes = read_routes(source, options)
    largest = int(routes.experts.max(initial=0))
    require(
        largest < MOST_EXPERTS,
        f"{routes.name}: has the id {largest:,}, and no model has over {MOST_EXPERTS:,} experts: "
        "are these numbers of experts?",
        TraceError,
    )
    return routes


def _checked_file(routes: Routes, n_experts: int | None) -> CheckedFile:
    """Sizes, format and reader's notes of one file."""
    table = route_table(routes, n_experts)
    rows, layers, k = routes.experts.shape
    return CheckedFile(
        name=routes.name,
        producer=routes.producer,
        rows=rows,
        documents=len(np.unique(table.documents)),
        layers=layers,
        routed=len(table.layers),
        k=k,
        n_experts=table.n_experts or int(routes.experts.max()) + 1,
        dtype=str(routes.experts.dtype),
        said=routes.notes,
        has_tokens=routes.tokens is not None,
    )


def _model_findings(
    routes: Routes, own_findings: Sequence[RouteFinding], model: Any
) -> tuple[list[RouteFinding], int]:
    """Findings with those of a model's routes, and the number of compared tokens."""
    if any(f.kind == "all-zero" and f.count == f.total for f in own_findings) or routes.problems:
        return list(own_findings), 0  # nothing can be compared
    reference = model_routes(routes, model)
    experts = reference.n_experts
    file_findings = (
        _file_findings(routes, experts) if routes.n_experts is None else list(own_findings)
    )
    return file_findings + agreement_findings(routes, reference, experts), len(reference.experts)


def model_routes(routes: Routes, model: Any, most_tokens: int = SAMPLE_TOKENS) -> Routes:
    """Route the first tokens of each document of a file with a model.

    Each document runs from position 0 to its last row in the sample, so that every token has its
    context.

    Args:
        routes: routes whose tokens are known from position 0 of each document.
        model: a Mixture-of-Experts model of transformers.
        most_tokens: largest number of tokens to route.
    """
    tokens = routes.tokens
    if tokens is None or bool((tokens < 0).any()):
        raise SettingError(
            "{routes}: a model needs the token ids of the rows: give them by {tokens}",
            routes=routes.name,
        )
    documents = routes.documents if routes.documents is not None else np.zeros(len(tokens), int)
    positions = routes.positions if routes.positions is not None else np.arange(len(tokens))
    numbers, sampled_ids, n_sampled = [], [], 0
    document_numbers = np.unique(documents)
    tokens_per_document = max(most_tokens // len(document_numbers), LEAST_SAMPLED)
    for number in document_numbers:
        rows = np.flatnonzero(documents == number)
        rows = rows[np.argsort(positions[rows], kind="stable")][
            : min(tokens_per_document, max(most_tokens - n_sampled, 0))
        ]
        complete = len(rows) > 0 and np.array_equal(positions[rows], np.arange(len(rows)))
        if len(rows) and not complete:
            raise ParameterError(
                f"{routes.name}: document {number} does not begin at position 0, or has holes: a "
                "model needs all tokens before a row"
            )
        if len(rows):
            numbers.append(int(number))
            sampled_ids.append(tokens[rows])
            n_sampled += len(rows)
    sequences = [torch.from_numpy(ids.astype(np.int64)) for ids in sampled_ids]
    check_vocabulary(model, sequences)
    batches = [ids[None] for ids in sequences]
    trace = recorded_routes(Model(model), Ranks.share_batches(None, batches))
    reference = routes_of_trace(trace, "the model")
    assert reference.documents is not None
    return replace(reference, documents=np.array(numbers)[reference.documents])
