"""tieline walks [MODEL]: how many roundings until a token changes its experts."""

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
    layer_choice,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars


@app.command()
@guarded
def walks(
    model: ModelName = "demo",
    text: TextFile = None,
    tokens: Annotated[
        int, typer.Option(help="How many tokens of the text; at most 2,048 are run.", min=1)
    ] = 4096,
    batch_size: BatchSize = 8,
    layers: Annotated[
        str | None, typer.Option(help="Routed layers, such as 0,2,5-7, or names of routers.")
    ] = None,
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
    """Simulate how long tokens keep their experts as the noise of bf16 collects."""
    outputs = Outputs(html, json_to, figure, overwrite=overwrite)
    outputs.check(model, text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.subject import SubjectOptions
        from tieline.lab.on_model.walks import walks as run

        quiet_transformers()
        options = SubjectOptions(
            text=text,
            tokens=tokens,
            batch_size=batch_size,
            layers=layer_choice(layers),
            seed=seed,
            dtype="fp32",
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        result = run(model, options, progress)
    deliver(result, outputs, "add --html page.html for the page")
