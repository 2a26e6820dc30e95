"""tieline soften [MODEL]: what a soft choice of experts does to the loss of a model."""

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
def soften(
    model: ModelName = "demo",
    max_cost: Annotated[
        float,
        typer.Option(help="Most cost, in forward passes over 16,384 tokens; more is refused."),
    ] = 10.0,
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the sample.", min=256)] = 4096,
    batch_size: BatchSize = 8,
    dtype: Annotated[
        str, typer.Option(help="Precision the model runs in: auto, fp32, bf16 or fp16.")
    ] = "auto",
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
    """Measure and predict what a soft choice does to the loss, layer by layer."""
    outputs = Outputs(html, json_to, figure, overwrite=overwrite)
    outputs.check(model, text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.soften import sample_of
        from tieline.lab.on_model.soften import soften as run
        from tieline.lab.on_model.subject import SubjectOptions

        quiet_transformers()
        options = SubjectOptions(
            text=text,
            tokens=tokens,
            batch_size=batch_size,
            layers=layer_choice(layers),
            seed=seed,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        settings = sample_of(tokens)
        result = run(model, options, settings, max_cost=max_cost, progress=progress)
    deliver(result, outputs, "add --html page.html for the page")
