"""tieline reproduce [CLAIM ...]: which statements of the papers hold, with numbers."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tieline.cli.app import CONDITION_HELD, OUR_BUG, app, guarded, say
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Html, Json, Overwrite
from tieline.core.errors import require
from tieline.lab.command_settings import ReproduceSettings

if TYPE_CHECKING:
    from tieline.lab.claims import Claim


@app.command()
@guarded
def reproduce(
    *,
    claims: Annotated[
        list[str] | None,
        typer.Argument(help="all, papers (0, boundary-mass, ...) or claims.", metavar="CLAIM ..."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="Show the claims, many of them by paper; test none.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="With --list: show every claim.")] = False,
    settings: ReproduceSettings,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Test statements of the papers; exit with 1 if a verdict differs from the ledger's.

    Results are stored as they come, so a stopped run continues where it was. They are valid as long
    as the code does not change.
    """
    outputs = Outputs(html, json_to, extended=settings.results, overwrite=overwrite)
    outputs.check()
    require(show or not every, "--all is for --list")
    names = claims or ["all"]
    with progress_bars(first="loading the claims"):
        from tieline.lab import claims as ledgers

        chosen = ledgers.select(names)
    if show:
        deliver(ledgers.Catalogue.of(chosen, in_full=every), outputs)
        return
    say(_reproduction_plan(chosen, settings))
    with progress_bars(first="claims") as progress:
        ledger = ledgers.reproduce(
            names,
            settings=settings,
            progress=lambda done, total: progress("claims", done, total),
        )
    deliver(ledger, outputs)
    if ledger.broken:
        say(f"this is a bug of tieline: tests broke: {', '.join(ledger.broken)}")
        raise typer.Exit(OUR_BUG)
    if ledger.changed:
        say(f"failed: verdicts changed: {', '.join(ledger.changed)}")
        raise typer.Exit(CONDITION_HELD)


def _reproduction_plan(claims: "Sequence[Claim]", settings: ReproduceSettings) -> str:
    """Return a sentence on what is tested and about how long that takes."""
    from tieline.report.words.numbers import duration

    papers = len({claim.paper for claim in claims})
    jobs = (os.cpu_count() or 1) if settings.jobs == -1 else settings.jobs
    processes = 1 if settings.executor == "serial" else jobs
    count = f"{len(claims)} claim{'s' * (len(claims) > 1)} of {papers} paper{'s' * (papers > 1)}"
    here = f"in {processes} process{'es' * (processes > 1)}"
    where = "on a cluster" if settings.executor == "dask" else here
    about = duration(_reproduction_seconds(claims, settings.fast, processes), 1)
    sentence = f"{count} {where}: about {about}, less where results are stored"
    if settings.fast:
        return sentence
    fast = _reproduction_seconds(claims, True, processes)
    return f"{sentence}; --fast takes about {duration(fast, 1)}"


def _reproduction_seconds(claims: "Sequence[Claim]", fast: bool, processes: int) -> float:
    """Estimate the time of the tests: the share of one process, and no less than one test."""
    each = [claim.duration(fast) for claim in claims]
    return float(math.ceil(max(sum(each) / processes, *each)))
