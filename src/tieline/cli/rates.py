"""tieline rates SETTING: how fast a router and its experts are learned, with slopes."""

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tieline.cli.app import Address, Debug, Engine, Jobs, Json, Seed, app, guarded, say
from tieline.cli.progress import progress_bars
from tieline.core.errors import ParameterError, require
from tieline.core.files import check_targets, json_target, write_whole
from tieline.report.outputs import to_json

__all__ = ["rates"]

FORMAT = "tieline-rates"


@app.command()
@guarded
def rates(
    setting: Annotated[
        str | None, typer.Argument(help="A setting by name; --list shows them.", metavar="SETTING")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show the settings, fit nothing.")] = False,
    gate: Annotated[
        str | None, typer.Option(help="linear, cosine, perturbed, quadratic or partial.")
    ] = None,
    link: Annotated[str | None, typer.Option(help="softmax or sigmoid.")] = None,
    expert: Annotated[
        str | None, typer.Option(help="linear, polynomial, relu, gelu, tanh or two_layer.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width d of the inputs.", min=1)] = None,
    experts: Annotated[int | None, typer.Option(help="Experts of the truth.", min=1)] = None,
    fitted: Annotated[
        int | None, typer.Option(help="Experts that are fitted, if more than the truth has.")
    ] = None,
    noise: Annotated[float | None, typer.Option(help="Standard deviation of the noise.")] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Sample sizes, such as 1000,3000,10000.")
    ] = None,
    repetitions: Annotated[int | None, typer.Option(help="Data sets for each size.")] = None,
    radius: Annotated[str | None, typer.Option(help="Start radii, such as 0.05,0.2,0.5.")] = None,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Let starts shrink like n^-1/2.")
    ] = False,
    starts: Annotated[int, typer.Option(help="Starts for each data set.", min=1)] = 1,
    method: Annotated[str, typer.Option(help="lm, sgd (the papers' recipe) or adam.")] = "lm",
    error: Annotated[
        float | None, typer.Option(help="Say how many samples bring the quotient loss to this.")
    ] = None,
    engine: Engine = "loky",
    address: Address = None,
    jobs: Jobs = -1,
    results: Annotated[
        Path | None, typer.Option(help="File of JSON lines where results are kept and found.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figure: .png, .pdf or .svg.")] = None,
    json_to: Json = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Fit a setting over a grid of sample sizes and report the slopes of its losses.

    Raw losses are the papers'; quotient losses leave out what the data cannot see. With --results a
    run that was stopped goes on where it was.
    """
    _check_targets(out, json_to, results)
    if show:
        print(_listed())
        return
    family = {"gate": gate, "link": link, "expert": expert, "d": width, "n_experts": experts}
    grid = {
        "sizes": _numbers("--sizes", sizes, int),
        "radii": _numbers("--radius", radius, float),
        "repetitions": repetitions,
        "noise": noise,
    }
    fixed = {"shrink": shrink, "starts": starts, "method": method, "seed": seed}
    case = _case(setting, family, fitted, {k: v for k, v in grid.items() if v is not None} | fixed)
    study = _run(case, results, error, engine, address, jobs)
    _write(study.to_dict(), out, json_to)


def _numbers(option: str, words: str | None, kind: type) -> tuple[Any, ...] | None:
    """Numbers with commas between them."""
    if words is None:
        return None
    try:
        found = tuple(kind(float(part)) for part in words.split(","))
    except (ValueError, OverflowError) as problem:
        raise ParameterError(f"{option} takes numbers with commas, got {words!r}") from problem
    require(all(map(math.isfinite, found)), f"{option} takes finite numbers, got {words!r}")
    return found


def _listed() -> str:
    from tieline.estimation.rate_plan import describe_settings

    return "\n".join(f"{name:34} {words}" for name, words in describe_settings().items())


def _case(
    setting: str | None, family: dict[str, Any], fitted: int | None, grid: dict[str, Any]
) -> Any:
    """The setting that is named, or the one that the options make."""
    from tieline.estimation.rate_plan import case_of, named_case

    given = {name: value for name, value in family.items() if value is not None}
    if setting is not None:
        options = [*given, *([] if fitted is None else ["fitted"])]
        require(not options, f"{setting} is a setting of its own: leave out {', '.join(options)}")
        return named_case(setting, **grid)
    require(bool(given), "say which setting: its name, or --gate, --link and --expert; --list")
    return case_of(**given, fitted=fitted, **grid)


def _run(
    case: Any,
    results: Path | None,
    error: float | None,
    engine: str,
    address: str | None,
    jobs: int,
) -> Any:
    """The study, after an estimate of its time, with a bar."""
    from tieline.core.parallel import check_executor
    from tieline.estimation.rates import rate_study, study_seconds

    check_executor(engine, address, jobs)
    seconds = study_seconds(case.plan, results, jobs)
    say(f"{case.plan.name}: about {_duration(seconds)}")
    with progress_bars() as progress:
        return rate_study(
            case,
            results=results,
            error=error,
            executor=engine,
            address=address,
            jobs=jobs,
            progress=lambda done, total: progress("fits", done, total),
            quiet=True,
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _check_targets(out: Path | None, json_to: str | None, results: Path | None) -> None:
    from tieline.report.figures import check_figure_path

    check_targets(out, json_target(json_to), results)
    if out is not None:
        check_figure_path(out)


def _write(record: dict[str, Any], out: Path | None, json_to: str | None) -> None:
    """Every file, after all have been made in memory; then the terminal."""
    from tieline.report.rates_table import rates_view

    made: list[tuple[Path, bytes]] = []
    if out is not None:
        from tieline.report.rates_figure import rates_figure_bytes

        made.append((out, rates_figure_bytes(record, out)))
    if (target := json_target(json_to)) is not None:
        made.append((target, to_json(record, FORMAT).encode()))
    for path, data in made:
        write_whole(path, data)
    if json_to == "-":
        sys.stdout.write(to_json(record, FORMAT))
    else:
        Console(highlight=False, soft_wrap=False).print(rates_view(record))
    for path, _ in made:
        say(f"wrote {path}")
