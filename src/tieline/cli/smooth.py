"""tieline smooth [MODEL] -o OUT: make routing continuous at ties, and measure what that repairs."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.analysis.settings import SmoothSettings
from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Html, Json, ModelName, Overwrite
from tieline.cli.ranks import joined


@app.command()
@guarded
def smooth(
    *,
    model: ModelName = "demo",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder for the smoothed model.")
    ] = None,
    settings: SmoothSettings,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Make routing continuous at ties instead of top-k, and measure what that repairs and costs."""
    outputs = Outputs(html, json_to, model=out, overwrite=overwrite)
    outputs.check(model, settings.text)
    with progress_bars() as progress, joined(settings.parallel, "smoothing") as parallel:
        from tieline.analysis.smooth import smooth as run
        from tieline.analysis.sources import quiet_transformers

        quiet_transformers()
        result = run(model, settings=settings, parallel=parallel, progress=progress)
    deliver(result, outputs, "add -o FOLDER to save the smoothed model")
