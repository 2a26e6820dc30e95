"""tieline reroute [MODEL] -o OUT: another router, fitted to the choices of the model's own."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tieline.cli.app import (
    BatchSize,
    Debug,
    Device,
    Html,
    Json,
    ModelName,
    Overwrite,
    Revision,
    Seed,
    TextFile,
    TrustRemoteCode,
    app,
    guarded,
    numbers,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.core.errors import require


@app.command()
@guarded
def reroute(
    model: ModelName = "demo",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder for the rerouted model.")
    ] = None,
    router: Annotated[
        str, typer.Option(help="cosine, perturbed, linear or quadratic.")
    ] = "perturbed",
    fit: Annotated[
        Path | None,
        typer.Option(help="Text to fit to, UTF-8; by default the first tokens of --text."),
    ] = None,
    text: TextFile = None,
    fit_tokens: Annotated[int, typer.Option(help="Tokens to fit to.", min=64)] = 8192,
    tokens: Annotated[int, typer.Option(help="Tokens to measure on.", min=64)] = 8192,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of the fit; by default as many as keep the choices.", min=0),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of cosine routers; fitted by default.")
    ] = None,
    tau: Annotated[
        str | None, typer.Option(help="τ1,τ2 of perturbed cosine routers; 0.1,0.1 by default.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Of the matrices of quadratic routers; 8 by default.", min=1)
    ] = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    revision: Revision = None,
    seed: Seed = 0,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Give a model another router, fitted to its own choices, and measure what is kept."""
    outputs = Outputs(html, json_to, made=out, overwrite=overwrite, page_package="matplotlib")
    outputs.check(model, text, fit)
    both: Any = numbers("--tau", tau, float)
    require(both is None or len(both) == 2, f"--tau takes two numbers such as 0.1,0.1, got {tau!r}")
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.reroute import reroute as run

        quiet_transformers()
        result = run(
            model,
            router=router,
            fit=fit,
            text=text,
            fit_tokens=fit_tokens,
            tokens=tokens,
            steps=steps,
            temperature=temperature,
            tau=both,
            rank=rank,
            batch_size=batch_size,
            seed=seed,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    deliver(result, outputs, "add -o FOLDER to save the rerouted model")
