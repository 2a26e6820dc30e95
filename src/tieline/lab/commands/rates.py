"""tieline rates SETTING: how fast a router and its experts are learned, with slopes."""

import math
from typing import Annotated

import typer

from tieline.cli.app import app, guarded, say
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Figure, Html, Json, Overwrite
from tieline.lab.command_settings import RatesSettings


@app.command()
@guarded
def rates(
    *,
    setting: Annotated[
        str | None, typer.Argument(help="Name of a setting; --list shows all.", metavar="SETTING")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show the settings, fit nothing.")] = False,
    settings: RatesSettings,
    html: Html = None,
    figure: Figure = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Fit a setting over a grid of sample sizes and report the slopes of its losses.

    Raw losses are defined as in the papers; quotient losses leave out directions that the data
    cannot determine. With --results a stopped run continues where it was.
    """
    results, package = settings.results, "matplotlib"
    outputs = Outputs(
        html, json_to, figure, extended=results, overwrite=overwrite, page_package=package
    )
    outputs.check()
    with progress_bars(first="loading the libraries"):
        from tieline.lab.estimation.rate_plan import case_of, describe_settings, named_case
        from tieline.lab.estimation.rates import rate_study, study_seconds
        from tieline.report.words.numbers import duration
    if show:
        print("\n".join(f"{name:34} {text}" for name, text in describe_settings().items()))
        return
    settings.check_setting(setting)
    if setting is None:
        case = case_of(**settings.family, **settings.grid)
    else:
        case = named_case(setting, **settings.grid)
    seconds = float(math.ceil(study_seconds(case.plan, results, settings.jobs)))
    say(f"{case.plan.name}: about {duration(seconds, 1)}")
    with progress_bars(first="fits") as progress:
        study = rate_study(
            case,
            results=results,
            error=settings.error,
            executor=settings.executor,
            address=settings.address,
            jobs=settings.jobs,
            progress=lambda done, total: progress("fits", done, total),
            quiet=True,
        )
    deliver(study, outputs)
