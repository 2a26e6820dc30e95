"""tieline reproduce [CLAIM ...]: which statements of the papers hold, with numbers."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tieline.cli.app import (
    CONDITION_HELD,
    OUR_BUG,
    Address,
    Debug,
    Engine,
    Jobs,
    Json,
    Seed,
    app,
    guarded,
    say,
)
from tieline.cli.progress import progress_bars
from tieline.core.files import cache_folder, check_targets, json_target, write_whole
from tieline.report.ledger_page import ledger_bytes
from tieline.report.ledger_table import catalogue_view, ledger_view
from tieline.report.outputs import to_json

__all__ = ["reproduce"]


@app.command()
@guarded
def reproduce(
    claims: Annotated[
        list[str] | None,
        typer.Argument(help="all, papers (0, boundary-mass, ...) or claims.", metavar="CLAIM ..."),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Smaller samples: minutes for everything.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Show the claims, test none.")] = False,
    engine: Engine = "loky",
    address: Address = None,
    jobs: Jobs = -1,
    results: Annotated[
        Path | None, typer.Option(help="Folder where results are kept, claim by claim.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page, ledger.html.")] = None,
    seed: Seed = 0,
    json_to: Json = None,
    debug: Debug = False,
) -> None:
    """Test statements of the papers; leave with 1 if a verdict is not the one of the ledger.

    Results are kept as they come, so that a run that was stopped goes on where it was. They count
    as long as the code does not change.
    """
    from tieline.papers import select

    _check_outputs(out, json_to)
    chosen = select(claims or ["all"])
    if show:
        _show_list(chosen, json_to)
        return
    ledger = _run(chosen, fast, seed, results, engine, address, jobs)
    _write(ledger, out, json_to)
    _leave(ledger)


def _check_outputs(out: Path | None, json_to: str | None) -> None:
    check_targets(out, json_target(json_to))
    if out is not None and find_spec("plotly") is None:
        raise ModuleNotFoundError(f"{out} needs plotly", name="plotly")


def default_results() -> Path:
    """The user's cache, where a run of any folder finds what another has tested."""
    return cache_folder("claims")


def _run(
    chosen: list[Any],
    fast: bool,
    seed: int,
    results: Path | None,
    engine: str,
    address: str | None,
    jobs: int,
) -> dict[str, Any]:
    from tieline.papers import Ledger, ResultStore, Run, run_claims

    run, store = Run(fast, seed), ResultStore(results or default_results())
    store.check()
    with progress_bars() as progress:
        progress("claims", 0, len(chosen))
        outcomes = run_claims(
            chosen,
            run,
            store,
            executor=engine,
            address=address,
            jobs=jobs,
            progress=lambda _, done, total: progress("claims", done, total),
        )
    return Ledger.of(outcomes, run).to_dict()


def _show_list(chosen: list[Any], json_to: str | None) -> None:
    from tieline.papers import Catalogue

    listed = Catalogue.of(chosen).to_dict()
    if (target := json_target(json_to)) is not None:
        write_whole(target, to_json(listed, "tieline-claims").encode())
    if json_to == "-":
        sys.stdout.write(to_json(listed, "tieline-claims"))
    else:
        Console(highlight=False).print(catalogue_view(listed))


def _write(ledger: dict[str, Any], out: Path | None, json_to: str | None) -> None:
    """Files first, all made before any is written; then the terminal."""
    made: list[tuple[Path, bytes]] = []
    if out is not None:
        made.append((out, ledger_bytes(ledger)))
    if (target := json_target(json_to)) is not None:
        made.append((target, to_json(ledger, "tieline-ledger").encode()))
    for path, data in made:
        write_whole(path, data)
    if json_to == "-":
        sys.stdout.write(to_json(ledger, "tieline-ledger"))
    else:
        console = Console(highlight=False)
        console.print(ledger_view(ledger, console.width))
    for path, _ in made:
        say(f"wrote {path}")


def _leave(ledger: dict[str, Any]) -> None:
    if ledger["broken"]:
        say(f"this is a bug of tieline: tests broke: {', '.join(ledger['broken'])}")
        raise typer.Exit(OUR_BUG)
    if ledger["changed"]:
        say(f"failed: verdicts changed: {', '.join(ledger['changed'])}")
        raise typer.Exit(CONDITION_HELD)
