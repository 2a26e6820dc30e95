"""tieline merge A B ... -o C: join traces, or streaming summaries."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import Debug, Json, Overwrite, Seed, app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.core.files import check_folder


@app.command()
@guarded
def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of traces, or of streaming summaries.", metavar="A B ..."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the whole.")],
    overwrite: Overwrite = False,
    renumber: Annotated[
        bool, typer.Option("--renumber", help="Give documents of traces new numbers.")
    ] = False,
    seed: Seed = 0,
    json_to: Json = None,
    debug: Debug = False,
) -> None:
    """Merge parts of a run into the whole, exactly: traces token by token, summaries by counts.

    Nothing is drawn at random: --seed is accepted, as by every command, and changes nothing.
    """
    outputs = Outputs(json=json_to, kept=out, overwrite=overwrite)
    outputs.check(*folders)
    check_folder(out)
    with progress_bars(first="merge"):
        from tieline.analysis.merge import merge as run

        result = run(folders, out, overwrite=overwrite, renumber=renumber)
    deliver(result, outputs)
