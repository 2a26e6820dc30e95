"""tieline audit [MODEL]: what low precision and noise do to a model's routing."""

from typing import Annotated

import typer

from tieline.cli.app import (
    BatchSize,
    Debug,
    Device,
    Html,
    Json,
    Keep,
    Memory,
    ModelName,
    Overwrite,
    Revision,
    Seed,
    Stream,
    TextFile,
    TrustRemoteCode,
    app,
    guarded,
    memory_size,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.ranks import Parallel, joined
from tieline.core.errors import require


@app.command()
@guarded
def audit(
    model: ModelName = "demo",
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text.", min=1)] = 16384,
    batch_size: BatchSize = 8,
    budget_minutes: Annotated[
        float | None,
        typer.Option(help="Begin nothing more after so many minutes, and say what was left out."),
    ] = None,
    formats: Annotated[
        str | None, typer.Option(help="Number formats, such as bf16,int4_group; all by default.")
    ] = None,
    recover: Annotated[
        float, typer.Option(help="Share of the damage that keeping routers in fp32 shall recover.")
    ] = 0.9,
    remedies: Annotated[
        str | None,
        typer.Option(
            help="Perturbations that remedies are tried on, such as 'router bf16,model int8'; all, "
            "none; by default router bf16, model bf16 and model int8."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Precision of the clean run: fp32, bf16, fp16 or auto.")
    ] = "fp32",
    device: Device = "cpu",
    revision: Revision = None,
    seed: Seed = 0,
    html: Html = None,
    json_to: Json = None,
    stream: Stream = None,
    memory: Memory = None,
    keep: Keep = True,
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    parallel: Parallel = None,
    debug: Debug = False,
) -> None:
    """Measure what low precision and noise do to a model's routing, and what to keep in float32."""
    require(0 < recover <= 1, f"--recover is a share of the damage in (0, 1], got {recover:g}")
    positive = budget_minutes is None or budget_minutes > 0
    require(positive, f"--budget-minutes must be positive, got {budget_minutes}")
    outputs = Outputs(html, json_to, overwrite=overwrite)
    outputs.check(model, text)
    with progress_bars() as progress, joined(parallel, "auditing") as way:
        from tieline.analysis.audit import audit as run
        from tieline.analysis.sources import quiet_transformers

        quiet_transformers()
        result = run(
            model,
            text=text,
            tokens=tokens,
            batch_size=batch_size,
            formats=[part.strip() for part in formats.split(",")] if formats else None,
            seed=seed,
            recover=recover,
            remedies=_names(remedies),
            budget_minutes=budget_minutes,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            stream=stream,
            memory=memory_size(memory),
            keep=keep,
            parallel=way,
            progress=progress,
        )
    deliver(result, outputs, "add --html audit.html for the page with charts")


def _names(remedies: str | None) -> list[str] | None:
    """Names between commas; no names for "none"."""
    if remedies is None:
        return None
    return [] if remedies.strip() == "none" else [part.strip() for part in remedies.split(",")]
