"""tieline convert IN OUT --to FORM: routes in the form of another program."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.analysis.job_settings import ConvertSettings
from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Json


@app.command()
@guarded
def convert(
    *,
    source: Annotated[str, typer.Argument(help="Routes in any form, or a trace.", metavar="IN")],
    output: Annotated[Path, typer.Argument(help="The file or folder to make.", metavar="OUT")],
    settings: ConvertSettings,
    json_to: Json = None,
) -> None:
    """Read routes of any producer and write them in the form of another."""
    outputs = Outputs(json=json_to, extended=output, overwrite=settings.overwrite)
    outputs.check(source, settings.tokens)
    with progress_bars(first="reading the routes"):
        from tieline.analysis.route_files import convert as run

        result = run(source, output, settings=settings)
    deliver(result, outputs)
