"""tieline merge A B ... -o C: join traces, or streaming summaries."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.analysis.job_settings import MergeSettings
from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Json
from tieline.core.files import check_folder


@app.command()
@guarded
def merge(
    *,
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of traces, or of streaming summaries.", metavar="A B ..."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the result.")],
    settings: MergeSettings,
    json_to: Json = None,
) -> None:
    """Merge the pieces of a run exactly: traces token by token, summaries by counts."""
    outputs = Outputs(json=json_to, extended=out, overwrite=settings.overwrite)
    outputs.check(*folders)
    check_folder(out)
    with progress_bars(first="reading the folders"):
        from tieline.analysis.route_files import merge as run

        result = run(folders, out, settings=settings)
    deliver(result, outputs)
