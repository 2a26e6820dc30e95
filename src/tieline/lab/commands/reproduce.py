"""tieline reproduce [CLAIM ...]: which statements of the papers hold, with numbers."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    Overwrite,
    Seed,
    app,
    guarded,
    say,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars

if TYPE_CHECKING:
    from tieline.lab.claims import Claim


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
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Test statements of the papers; exit with 1 if a verdict differs from the ledger's.

    Results are stored as they come, so a stopped run continues where it was. They are valid as long
    as the code does not change.
    """
    outputs = Outputs(html, json_to, kept=results, overwrite=overwrite)
    outputs.check()
    with progress_bars():
        from tieline.core.parallel import check_executor
        from tieline.lab import claims as claims_room

        chosen = claims_room.select(claims or ["all"])
    if show:
        deliver(claims_room.Catalogue.of(chosen), outputs)
        return
    check_executor(executor, address, jobs)
    say(_plan(chosen, fast, executor, jobs))
    with progress_bars() as progress:
        ledger = claims_room.reproduce(
            claims or ["all"],
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


def _plan(claims: "Sequence[Claim]", fast: bool, executor: str, jobs: int) -> str:
    """What is tested and about how long that takes, as a sentence."""
    from tieline.report.words.numbers import duration

    papers = len({claim.paper for claim in claims})
    here = 1 if executor == "serial" else (os.cpu_count() or 1) if jobs == -1 else jobs
    count = f"{len(claims)} claim{'s' * (len(claims) > 1)} of {papers} paper{'s' * (papers > 1)}"
    where = "on a cluster" if executor == "dask" else f"in {here} process{'es' * (here > 1)}"
    about = duration(_seconds(claims, fast, here), 1)
    what = f"{count} {where}: about {about}, less where results are stored"
    return (
        what if fast else f"{what}; --fast takes about {duration(_seconds(claims, True, here), 1)}"
    )


def _seconds(claims: "Sequence[Claim]", fast: bool, processes: int) -> float:
    """About how long the tests take: what one process has to do, and no less than one test."""
    each = [claim.duration(fast) for claim in claims]
    return float(math.ceil(max(sum(each) / processes, *each)))
