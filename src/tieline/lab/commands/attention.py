"""tieline attention [MODEL]: a model's attention heads as mixtures of keys."""

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
    TextFile,
    TrustRemoteCode,
    app,
    guarded,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars


@app.command()
@guarded
def attention(
    model: ModelName = "demo",
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text.", min=1)] = 4096,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    revision: Revision = None,
    html: Html = None,
    json_to: Json = None,
    figure: Annotated[
        Path | None, typer.Option(help="Write the figure: .pdf, .png or .svg.")
    ] = None,
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Look at attention heads as mixtures of keys, and at what sigmoid attention would change."""
    outputs = Outputs(html, json_to, figure, overwrite=overwrite, page_package="matplotlib")
    outputs.check(model, text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.attention.view import attention_view

        quiet_transformers()
        result = attention_view(
            model,
            text=text,
            tokens=tokens,
            batch_size=batch_size,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    deliver(result, outputs, "add --html page.html for the page")
