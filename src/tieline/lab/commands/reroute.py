"""tieline reroute [MODEL] -o OUT: another router, fitted to the choices of the model's own."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Html, Json, ModelName, Overwrite
from tieline.lab.settings import RerouteSettings


@app.command()
@guarded
def reroute(
    *,
    model: ModelName = "demo",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder for the rerouted model.")
    ] = None,
    settings: RerouteSettings,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Give a model another router, fitted to its own choices, and measure what is kept."""
    outputs = Outputs(html, json_to, model=out, overwrite=overwrite, page_package="matplotlib")
    outputs.check(model, settings.text, settings.fit)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.reroute import reroute as run

        quiet_transformers()
        result = run(model, settings=settings, progress=progress)
    deliver(result, outputs, "add -o FOLDER to save the rerouted model")
