"""tieline merge A B ... -o C: one streaming summary of several."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import Debug, Json, Seed, app, guarded
from tieline.report.files import check_target, write_whole
from tieline.report.outputs import to_json

__all__ = ["merge"]


@app.command()
@guarded
def merge(
    summaries: Annotated[
        list[Path], typer.Argument(help="Folders of streaming summaries.", metavar="A B ...")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the merged summary.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a summary that is there.")
    ] = False,
    seed: Seed = 0,
    json_to: Json = None,
    debug: Debug = False,
) -> None:
    """Merge streaming summaries of parts of a run into that of the whole, exactly.

    Nothing is drawn at random: --seed is accepted, as by every command, and changes nothing.
    """
    from tieline.trace import load_summary, save_summary
    from tieline.trace import merge as merged

    target = None if json_to in (None, "-") else Path(str(json_to))
    if target is not None:
        check_target(target)
    whole = merged([load_summary(folder) for folder in summaries])
    told = {
        "summaries": [str(folder) for folder in summaries],
        "output": str(out),
        "tokens": whole.tokens,
        "sampled": whole.sample.n_tokens,
        "layers": [layer.name for layer in whole.layers],
    }
    save_summary(whole, out, overwrite=overwrite)
    if target is not None:
        write_whole(target, to_json(told, "tieline-merge").encode())
    if json_to == "-":
        sys.stdout.write(to_json(told, "tieline-merge"))
    else:
        print(
            f"{out}: {whole.tokens:,} tokens of {len(summaries)} summaries, "
            f"{len(whole.layers)} layers"
        )
