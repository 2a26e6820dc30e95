"""tieline merge A B ... -o C: one trace, or one streaming summary, of several."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tieline.cli.app import Debug, Json, Seed, app, guarded, say
from tieline.cli.progress import progress_bars
from tieline.core.files import write_whole
from tieline.report.outputs import Outputs, to_json

__all__ = ["merge"]


@app.command()
@guarded
def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of traces, or of streaming summaries.", metavar="A B ..."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the whole.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a folder of the same kind that is there.")
    ] = False,
    renumber: Annotated[
        bool,
        typer.Option("--renumber", help="For traces: give documents new numbers, part after part."),
    ] = False,
    seed: Seed = 0,
    json_to: Json = None,
    debug: Debug = False,
) -> None:
    """Merge parts of a run into the whole, exactly: traces token by token, summaries by counts.

    Nothing is drawn at random: --seed is accepted, as by every command, and changes nothing.
    """
    outputs = Outputs(json=json_to)
    outputs.check()
    from tieline.trace import merge_folders

    with progress_bars() as progress:
        progress("merge", 0, 1)
        documents = "renumber" if renumber else "keep"
        whole = merge_folders(folders, out, overwrite=overwrite, documents=documents)
        told = _told(whole, folders, out)
    for path in outputs.files:
        write_whole(path, to_json(told, "tieline-merge").encode())
        say(f"wrote {path}")
    if outputs.to_stdout:
        sys.stdout.write(to_json(told, "tieline-merge"))
    else:
        several = "summaries" if told["kind"] == "summary" else "traces"
        counts = f"{told['tokens']:,} tokens of {len(folders)} {several}"
        print(f"{out}: {counts}, {len(told['layers'])} layers")


def _told(whole: Any, folders: list[Path], out: Path) -> dict[str, Any]:
    """What `--json` tells; of a trace every token is kept, of a summary a sample."""
    from tieline.trace import RoutingTrace

    is_trace = isinstance(whole, RoutingTrace)
    return {
        "kind": "trace" if is_trace else "summary",
        "folders": [str(folder) for folder in folders],
        "output": str(out),
        "tokens": whole.n_tokens if is_trace else whole.tokens,
        "sampled": whole.n_tokens if is_trace else whole.sample.n_tokens,
        "layers": [layer.name for layer in whole.layers],
    }
