"""tieline frontier [MODEL]: how much repair smoothing buys, at which price, width by width."""

from pathlib import Path
from typing import Annotated

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
)
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.lab.settings import SubjectSettings


@app.command()
@guarded
def frontier(
    model: ModelName = "demo",
    noise: Annotated[
        str, typer.Option(help="The precision to repair: bf16, int8, 'router bf16', ...")
    ] = "router bf16",
    gate: Annotated[
        str | None,
        typer.Option(help="projected: tied experts share a seat; ramp: experts are added."),
    ] = None,
    calibration: Annotated[
        int, typer.Option(help="Tokens before those, to learn the noise on.", min=64)
    ] = 4096,
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="Tokens to measure on.", min=64)] = 16384,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    revision: Revision = None,
    seed: Seed = 0,
    html: Html = None,
    json_to: Json = None,
    figure: Annotated[
        Path | None, typer.Option(help="Write the figure: .pdf, .png or .svg.")
    ] = None,
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Measure smoothed forms of a model of many widths, and hold the law against its layers."""
    outputs = Outputs(html, json_to, figure, overwrite=overwrite)
    outputs.check(model, text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.frontier import FrontierSettings
        from tieline.lab.on_model.frontier import frontier as run
        from tieline.models.smooth import gate_named

        quiet_transformers()
        options = SubjectSettings(
            text=text,
            tokens=tokens,
            batch_size=batch_size,
            seed=seed,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        settings = FrontierSettings(noise, gate_named(gate) or "projected", calibration)
        result = run(model, options, settings, progress)
    deliver(result, outputs, "add --html page.html for the page")
