"""tieline check ROUTES ...: whether files of routes are sound."""

from typing import Annotated

import typer

from tieline.analysis.job_settings import CheckSettings
from tieline.cli.app import CONDITION_HELD, app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Html, Json, Overwrite


@app.command()
@guarded
def check(
    *,
    routes: Annotated[
        list[str],
        typer.Argument(help="Files of routes, or folders of traces.", metavar="ROUTES ..."),
    ],
    settings: CheckSettings,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Check whether files of routes are sound; exit with 1 if one is not."""
    outputs = Outputs(html, json_to, overwrite=overwrite, page_package="jinja2")
    outputs.check(*routes, settings.tokens, settings.against, settings.model)
    with progress_bars(first="reading the routes"):
        from tieline.analysis.check import check as run
        from tieline.models.checkpoint import quiet_transformers

        quiet_transformers()
        result = run(routes, settings=settings)
    deliver(result, outputs)
    if not result.sound:
        raise typer.Exit(CONDITION_HELD)
