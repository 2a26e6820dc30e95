"""tieline upcycle MODEL -o OUT: turn a dense model into a Mixture of Experts."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Json, Overwrite
from tieline.lab.settings import UpcycleSettings


@app.command()
@guarded
def upcycle(
    *,
    model: Annotated[str, typer.Argument(help="Folder or hub id.", metavar="MODEL")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the mixture.")],
    settings: UpcycleSettings,
    overwrite: Overwrite = False,
    json_to: Json = None,
) -> None:
    """Copy a dense model's feed-forward networks into experts; the function stays, to rounding."""
    outputs = Outputs(json=json_to, model=out, overwrite=overwrite)
    outputs.check(model, settings.text)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.upcycle import upcycle as run

        quiet_transformers()
        result = run(model, settings=settings, progress=progress)
    deliver(replace(result, output=str(out)), outputs)
