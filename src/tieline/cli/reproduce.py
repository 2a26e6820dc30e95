"""tieline reproduce [CLAIM ...]: which statements of the papers hold, with numbers."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import (
    CONDITION_HELD,
    OUR_BUG,
    Address,
    Debug,
    Executor,
    Html,
    Jobs,
    Json,
    Seed,
    app,
    guarded,
    say,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars


@app.command()
@guarded
def reproduce(
    claims: Annotated[
        list[str] | None,
        typer.Argument(help="all, papers (0, boundary-mass, ...) or claims.", metavar="CLAIM ..."),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Use smaller samples: minutes for everything.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Show the claims, test none.")] = False,
    executor: Executor = "loky",
    address: Address = None,
    jobs: Jobs = -1,
    results: Annotated[
        Path | None, typer.Option(help="Folder that keeps results between runs, one per claim.")
    ] = None,
    html: Html = None,
    seed: Seed = 0,
    json_to: Json = None,
    debug: Debug = False,
) -> None:
    """Test statements of the papers; exit with 1 if a verdict differs from the ledger's.

    Results are stored as they come, so a stopped run continues where it was. They are valid as long
    as the code does not change.
    """
    outputs = Outputs(html, json_to)
    outputs.check()
    from tieline import papers

    names = claims or ["all"]
    if show:
        deliver(papers.Catalogue.of(papers.select(names)), outputs)
        return
    with progress_bars() as progress:
        ledger = papers.reproduce(
            names,
            fast=fast,
            seed=seed,
            results=results,
            executor=executor,
            address=address,
            jobs=jobs,
            progress=lambda done, total: progress("claims", done, total),
        )
    deliver(ledger, outputs)
    if ledger.broken:
        say(f"this is a bug of tieline: tests broke: {', '.join(ledger.broken)}")
        raise typer.Exit(OUR_BUG)
    if ledger.changed:
        say(f"failed: verdicts changed: {', '.join(ledger.changed)}")
        raise typer.Exit(CONDITION_HELD)
