"""The two sides of a comparison, read or run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieline.cli.input import read_text
from tieline.cli.models import load
from tieline.cli.progress import Report
from tieline.core.errors import require

__all__ = ["Sources", "compare_sources"]


@dataclass(frozen=True)
class Sources:
    """What the user named, A first.

    Attributes:
        names: folders, files or models.
        dtypes: precision that each model runs in.
        experts: expert implementation of each model.
        revisions: of each model on the hub.
        device: where models run.
        trust: whether code that comes with models may run.
        n_experts: number of experts, for files that do not tell.
        k: experts chosen per line of a table.
    """

    names: tuple[str, str]
    dtypes: tuple[str, str]
    experts: tuple[str | None, str | None]
    revisions: tuple[str | None, str | None]
    device: str
    trust: bool
    n_experts: int | None
    k: int | None


def compare_sources(
    sources: Sources,
    text: Path | None,
    tokens: int,
    length: int,
    batch_size: int,
    partial: bool,
    progress: Report,
) -> dict[str, Any]:
    """The comparison as JSON values.

    Two models run on the text; a model beside a trace runs on the tokens of the trace.
    """
    from tieline.analysis.diff import diff
    from tieline.analysis.diff_models import read_source, source_kind

    kinds = [source_kind(name) for name in sources.names]
    _check_options(sources, kinds, text)
    if kinds == ["model", "model"]:
        return _two_models(sources, text, tokens, length, batch_size, progress)
    traces = {
        place: read_source(name, sources.n_experts, sources.k)
        for place, name in enumerate(sources.names)
        if kinds[place] != "model"
    }
    for place in (0, 1):
        if kinds[place] == "model":
            traces[place] = _beside(sources, place, traces[1 - place], batch_size, progress)
    result: dict[str, Any] = diff(traces[0], traces[1], partial=partial).to_dict()
    return _named(result, sources, kinds)


def _check_options(sources: Sources, kinds: list[str], text: Path | None) -> None:
    """Refuse settings of models for sides that are none, and a text that nothing runs on."""
    from tieline.analysis.diff_models import read_dtype

    for place, side in enumerate("ab"):
        read_dtype(sources.dtypes[place])
        plain = (sources.dtypes[place], sources.experts[place], sources.revisions[place])
        require(
            kinds[place] == "model" or plain == ("auto", None, None),
            f"--dtype-{side}, --experts-{side} and --revision-{side} are for models, and "
            f"{sources.names[place]} is a {kinds[place]}",
        )
    require(
        text is None or kinds == ["model", "model"],
        "--text is for two models: a model beside a trace runs on the tokens of the trace",
    )


def _side(sources: Sources, place: int) -> tuple[Any, Any]:
    """The model of a side, ready to run, and its tokenizer."""
    from tieline.analysis.diff_models import SHIPPED, Side, read_dtype
    from tieline.hf.loading import use_experts

    dtype, emulated = read_dtype(sources.dtypes[place])
    name = sources.names[place]
    wanted = None if name == SHIPPED and not Path(name).exists() else name
    loaded = load(wanted, sources.revisions[place], dtype, sources.device, sources.trust)
    use_experts(loaded.model, sources.experts[place])
    return Side(loaded.model, emulated), loaded.tokenizer


def _two_models(
    sources: Sources,
    text: Path | None,
    tokens: int,
    length: int,
    batch_size: int,
    progress: Report,
) -> dict[str, Any]:
    from tieline.analysis.diff_models import diff_models, same_tokens
    from tieline.analysis.text import tokenise
    from tieline.hf.shipped import shipped_text

    words, source = read_text(text) if text else (shipped_text(), "shipped")
    sides, cut = [], []
    for place in (0, 1):
        side, tokenizer = _side(sources, place)
        sides.append(side)
        cut.append(tokenise(tokenizer, words, tokens, _length(side.model, length)).sequences)
    same_tokens(cut[0], cut[1])
    found = diff_models(sides[0], sides[1], cut[0], batch_size=batch_size, progress=progress).diff
    result: dict[str, Any] = found.to_dict()
    result["provenance"] |= {"text": source, "tokens": sum(map(len, cut[0]))}
    return _named(result, sources, ["model", "model"])


def _length(model: Any, length: int) -> int:
    from tieline.hf.running import text_config

    most = getattr(text_config(model), "max_position_embeddings", None)
    return min(length, most) if isinstance(most, int) and most > 1 else length


def _beside(sources: Sources, place: int, trace: Any, batch_size: int, progress: Report) -> Any:
    """The routing of a model on the tokens of a trace."""
    from tieline.analysis.diff_models import sequences_of, trace_model

    sequences, documents = sequences_of(trace)
    side, _ = _side(sources, place)
    return trace_model(
        side, sequences, documents=documents, batch_size=batch_size, progress=progress
    )


def _named(result: dict[str, Any], sources: Sources, kinds: list[str]) -> dict[str, Any]:
    """The result with the names that the user gave to the sides."""
    for side, name, kind in zip("ab", sources.names, kinds, strict=True):
        own = dict(result["provenance"][side])
        own["model" if kind == "model" else "file"] = name
        result["provenance"][side] = own
    return result
