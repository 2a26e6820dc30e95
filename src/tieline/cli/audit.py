"""tieline audit [MODEL]: what low precision and noise do to a model's routing."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tieline.cli.app import Debug, Json, Seed, app, guarded, say
from tieline.cli.input import read_text
from tieline.cli.models import (
    BatchSize,
    Device,
    ModelName,
    Revision,
    TextFile,
    TrustRemoteCode,
    load,
)
from tieline.cli.progress import progress_bars
from tieline.core.errors import require
from tieline.core.files import check_targets, json_target, write_whole
from tieline.report.outputs import to_json

__all__ = ["audit"]

FORMAT = "tieline-audit"


@app.command()
@guarded
def audit(
    model: ModelName = None,
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of it.", min=1)] = 16384,
    batch_size: BatchSize = 8,
    budget_minutes: Annotated[
        float | None,
        typer.Option(help="Begin nothing more after so many minutes, and say what was left out."),
    ] = None,
    formats: Annotated[
        str | None, typer.Option(help="Number formats, such as bf16,int4_group; all by default.")
    ] = None,
    recover: Annotated[
        float, typer.Option(help="Share of the damage that keeping routers shall recover.")
    ] = 0.9,
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16, fp16 or auto: the precision of the clean run.")
    ] = "fp32",
    device: Device = "cpu",
    revision: Revision = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write the page, audit.html.")] = None,
    json_to: Json = None,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """What low precision and noise do to a model's routing, and what to keep in float32."""
    _check(out, json_to, recover, budget_minutes)
    chosen = _formats(formats)
    words, source = read_text(text) if text else ("", "shipped")
    loaded = load(model, revision, dtype, device, trust_remote_code)
    with progress_bars() as progress:
        result = _audit(
            loaded,
            words,
            chosen,
            source=source,
            tokens=tokens,
            batch_size=batch_size,
            seed=seed,
            recover=recover,
            budget_minutes=budget_minutes,
            progress=progress,
        )
        _write(result, out, json_to)
    _show(result, out, json_to)


def _check(
    out: Path | None, json_to: str | None, recover: float, budget_minutes: float | None
) -> None:
    require(0 < recover <= 1, f"--recover is a share of the damage in (0, 1], got {recover:g}")
    positive = budget_minutes is None or budget_minutes > 0
    require(positive, f"--budget-minutes must be positive, got {budget_minutes}")
    check_targets(out, json_target(json_to))


def _formats(words: str | None) -> list[str] | None:
    if words is None:
        return None
    from tieline.hf.formats import format_named

    return [format_named(part.strip()).name for part in words.split(",")]


def _audit(loaded: Any, text: str, formats: list[str] | None, **options: Any) -> dict[str, Any]:
    from tieline.analysis.perturbations import standard_perturbations
    from tieline.analysis.precision import audit_precision
    from tieline.hf.shipped import shipped_text

    chosen = standard_perturbations(formats) if formats else standard_perturbations()
    done = audit_precision(
        loaded.model, loaded.tokenizer, text or shipped_text(), perturbations=chosen, **options
    )
    result: dict[str, Any] = done.to_dict()
    result["provenance"] |= {"model": loaded.name}
    return result


def _write(result: dict[str, Any], out: Path | None, json_to: str | None) -> None:
    """Every file, after all have been made in memory."""
    made: list[tuple[Path, bytes]] = []
    if out is not None:
        from tieline.report.audit_page import audit_page_bytes

        made.append((out, audit_page_bytes(result)))
    if (target := json_target(json_to)) is not None:
        made.append((target, to_json(result, FORMAT).encode()))
    for path, data in made:
        write_whole(path, data)


def _show(result: dict[str, Any], out: Path | None, json_to: str | None) -> None:
    from tieline.report.audit_table import audit_view

    if json_to == "-":
        sys.stdout.write(to_json(result, FORMAT))
    else:
        console = Console(highlight=False, soft_wrap=False)
        console.print(audit_view(result, console.width))
    written = [path for path in (out, json_target(json_to)) if path is not None]
    for path in written:
        say(f"wrote {path}")
    if not written and json_to != "-":
        say("add --out audit.html for the page with charts")
