"""tieline slice [MODEL]: the plane through three tokens' hidden states at one router."""

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
    numbers,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.core.errors import require


@app.command("slice")
@guarded
def slice_command(
    model: ModelName = "demo",
    layer: Annotated[
        str | None,
        typer.Option(help="Layer, by place or name; by default the first with flat walls."),
    ] = None,
    places: Annotated[
        str | None,
        typer.Option(help="Three tokens of the text by place, such as 7,80,300; by default drawn."),
    ] = None,
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text.", min=3)] = 4096,
    batch_size: BatchSize = 8,
    dtype: Annotated[
        str, typer.Option(help="Precision the model runs in: auto, fp32, bf16 or fp16.")
    ] = "auto",
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
    """Draw the plane through three tokens' hidden states at one router, and check it."""
    chosen, three = layer_choice(layer), numbers("--places", places, int)
    require(not chosen or len(chosen) == 1, f"--layer takes one layer, got {layer!r}")
    outputs = Outputs(html, json_to, figure, overwrite=overwrite, page_package="jinja2")
    outputs.check(model, text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.slice import SliceChoice, slice_model
        from tieline.lab.on_model.subject import SubjectOptions

        quiet_transformers()
        options = SubjectOptions(
            text=text,
            tokens=tokens,
            batch_size=batch_size,
            seed=seed,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        choice = SliceChoice(chosen[0] if chosen else None, three)
        result = slice_model(model, choice, options, progress)
    deliver(result, outputs, "add --html page.html for the page")
