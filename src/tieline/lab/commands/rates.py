"""tieline rates SETTING: how fast a router and its experts are learned, with slopes."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from tieline.cli.app import (
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
    numbers,
    say,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.core.errors import require

OPTIONS = {"d": "--dim", "n_experts": "--n-experts"} | {
    name: f"--{name}" for name in ("gate", "link", "expert", "fitted")
}
"""The options that describe a setting, by the names of the library."""


@app.command()
@guarded
def rates(
    setting: Annotated[
        str | None, typer.Argument(help="Name of a setting; --list shows all.", metavar="SETTING")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show the settings, fit nothing.")] = False,
    gate: Annotated[
        str | None, typer.Option(help="linear, cosine, perturbed, quadratic or partial.")
    ] = None,
    link: Annotated[str | None, typer.Option(help="softmax or sigmoid.")] = None,
    expert: Annotated[
        str | None, typer.Option(help="linear, polynomial, relu, gelu, tanh or two_layer.")
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Dimension d of the inputs.", min=1)] = None,
    n_experts: Annotated[
        int | None, typer.Option("--n-experts", help="Experts of the truth.", min=1)
    ] = None,
    fitted: Annotated[
        int | None, typer.Option(help="Experts to fit, if more than the truth has.")
    ] = None,
    noise: Annotated[float | None, typer.Option(help="Standard deviation of the noise.")] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Sample sizes, such as 1000,3000,10000.")
    ] = None,
    repetitions: Annotated[int | None, typer.Option(help="Data sets for each size.")] = None,
    radius: Annotated[str | None, typer.Option(help="Start radii, such as 0.05,0.2,0.5.")] = None,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Shrink the start radii like n^-1/2.")
    ] = False,
    starts: Annotated[int, typer.Option(help="Starts for each data set.", min=1)] = 1,
    method: Annotated[str, typer.Option(help="lm, sgd (the papers' recipe) or adam.")] = "lm",
    error: Annotated[
        float | None, typer.Option(help="Estimate the sample size for this quotient loss.")
    ] = None,
    executor: Executor = "loky",
    address: Address = None,
    jobs: Jobs = -1,
    results: Annotated[
        Path | None, typer.Option(help="File of JSON lines that keeps results between runs.")
    ] = None,
    html: Html = None,
    figure: Annotated[Path | None, typer.Option(help="Write the plot: .pdf, .png or .svg.")] = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Fit a setting over a grid of sample sizes and report the slopes of its losses.

    Raw losses are defined as in the papers; quotient losses leave out directions that the data
    cannot determine. With --results a stopped run continues where it was.
    """
    page = "matplotlib"
    outputs = Outputs(html, json_to, figure, kept=results, overwrite=overwrite, page_package=page)
    outputs.check()
    with progress_bars():
        from tieline.core.parallel import check_executor
        from tieline.lab.estimation.rate_plan import describe_settings
        from tieline.lab.estimation.rates import rate_study, study_seconds
        from tieline.report.words.numbers import duration
    if show:
        print("\n".join(f"{name:34} {words}" for name, words in describe_settings().items()))
        return
    family = {"gate": gate, "link": link, "expert": expert, "d": dim, "n_experts": n_experts}
    grid = {
        "sizes": numbers("--sizes", sizes, int),
        "radii": numbers("--radius", radius, float),
        "repetitions": repetitions,
        "noise": noise,
    }
    fixed = {"shrink": shrink, "starts": starts, "method": method, "seed": seed}
    case = _case(setting, _given(family | {"fitted": fitted}), _given(grid) | fixed)
    check_executor(executor, address, jobs)
    seconds = float(math.ceil(study_seconds(case.plan, results, jobs)))
    say(f"{case.plan.name}: about {duration(seconds, 1)}")
    with progress_bars() as progress:
        study = rate_study(
            case,
            results=results,
            error=error,
            executor=executor,
            address=address,
            jobs=jobs,
            progress=lambda done, total: progress("fits", done, total),
            quiet=True,
        )
    deliver(study, outputs)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _case(setting: str | None, family: dict[str, Any], grid: dict[str, Any]) -> Any:
    """The named setting, or the one that the options describe."""
    from tieline.lab.estimation.rate_plan import case_of, named_case

    if setting is not None:
        extra = ", ".join(OPTIONS[name] for name in family)
        require(not extra, f"{setting} is a complete setting: leave out {extra}")
        return named_case(setting, **grid)
    chosen = bool(set(family) - {"fitted"})
    require(chosen, "say which setting: its name, or --gate, --link and --expert; see --list")
    return case_of(**family, **grid)
