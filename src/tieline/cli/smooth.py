"""tieline smooth [MODEL] -o OUT: make routing continuous at ties, and measure what that repairs."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.analysis.job_settings import SmoothSettings
from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, run_job
from tieline.cli.options import Html, Json, ModelName, Overwrite


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
    result = run_job("tieline.analysis.smooth:smooth", model, settings=settings, doing="smoothing")
    deliver(result, outputs, "add -o FOLDER to save the smoothed model")
