"""The commands of the laboratory.

soften      what a soft choice of experts does to the loss of a model
slice       the plane through three tokens' hidden states at one router
walks       how many roundings until a token changes its experts
attention   a model's attention heads as mixtures of keys
frontier    how much repair smoothing buys, at which price, width by width
reroute     another router, fitted to the choices of the model's own
upcycle     a dense model turned into a Mixture of Experts
design      what a number of experts, active experts and expert width buys
train       train a small or large model by a named recipe, and score it
rates       how fast a router and its experts are learned, with slopes
reproduce   which statements of the papers hold, with numbers
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tieline.cli.app import app, guarded, run_job
from tieline.cli.options import Figure, Html, Json, ModelName, Overwrite
from tieline.cli.outputs import Outputs, deliver
from tieline.cli.progress import progress_bars
from tieline.cli.terminal_session import (
    BAD_INPUT,
    CONDITION_HELD,
    OUR_BUG,
    print_to_stderr,
    uncollected_imports,
)
from tieline.core.errors import require
from tieline.lab.command_settings import (
    AttentionSettings,
    DesignSettings,
    FrontierSettings,
    RatesSettings,
    ReproduceSettings,
    RerouteSettings,
    SliceSettings,
    SoftenSettings,
    TrainSettings,
    UpcycleSettings,
    WalksSettings,
)

if TYPE_CHECKING:
    from tieline.lab.claims import Claim

FIRST_RANK_GRACE = 2.0
"""Seconds for rank 0 to print its error: torchrun ends all processes when one exits."""


def add_model_command(
    name: str, settings_class: type[Any], job: str, purpose: str, page_package: str = "plotly"
) -> None:
    """Add a command that runs a job on a model and delivers page, figure and JSON.

    Args:
        name: name of the command.
        settings_class: settings of the job, one option each.
        job: "module:function" of the job.
        purpose: help text of the command.
        page_package: package that draws the page.
    """

    def command(
        *,
        model: ModelName = "demo",
        settings: Any,
        html: Html = None,
        json_to: Json = None,
        figure: Figure = None,
        overwrite: Overwrite = False,
    ) -> None:
        """Check the outputs, run the job and deliver its result."""
        outputs = Outputs(html, json_to, figure, overwrite=overwrite, page_package=page_package)
        outputs.check_targets(model, settings.text)
        result = run_job(job, model, settings=settings)
        deliver(result, outputs, "add --html page.html for the page")

    command.__name__, command.__doc__ = name, purpose
    command.__annotations__["settings"] = settings_class
    app.command(name)(guarded(command))


add_model_command(
    "soften",
    SoftenSettings,
    "tieline.lab.on_model.soften:soften",
    "Measure and predict what a soft choice does to the loss, layer by layer.",
)
add_model_command(
    "slice",
    SliceSettings,
    "tieline.lab.on_model.slice:slice_model",
    "Draw the plane through three tokens' hidden states at one router, and check it.",
    "jinja2",
)
add_model_command(
    "walks",
    WalksSettings,
    "tieline.lab.on_model.walks:walks",
    "Simulate how long tokens keep their experts as the noise of bf16 collects.",
)
add_model_command(
    "attention",
    AttentionSettings,
    "tieline.lab.attention.head_view:attention_view",
    "Look at attention heads as mixtures of keys, and at what sigmoid attention would change.",
    "matplotlib",
)
add_model_command(
    "frontier",
    FrontierSettings,
    "tieline.lab.on_model.frontier:frontier",
    "Measure smoothed forms of a model of many widths, and hold the law against its layers.",
)


@app.command()
@guarded
def reroute(
    *,
    model: ModelName = "demo",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder for the rerouted model.")
    ] = None,
    settings: RerouteSettings,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Give a model another router, fitted to its own choices, and measure what is kept."""
    outputs = Outputs(html, json_to, model=out, overwrite=overwrite, page_package="matplotlib")
    outputs.check_targets(model, settings.text, settings.fit)
    result = run_job("tieline.lab.on_model.reroute:reroute", model, settings=settings)
    deliver(result, outputs, "add -o FOLDER to save the rerouted model")


@app.command()
@guarded
def upcycle(
    *,
    model: Annotated[str, typer.Argument(help="Folder or hub id.", metavar="MODEL")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the mixture.")],
    settings: UpcycleSettings,
    overwrite: Overwrite = False,
    json_to: Json = None,
) -> None:
    """Copy a dense model's feed-forward networks into experts; the function stays, to rounding."""
    outputs = Outputs(json=json_to, model=out, overwrite=overwrite)
    outputs.check_targets(model, settings.text)
    result = run_job("tieline.lab.on_model.upcycle:upcycle", model, settings=settings)
    deliver(replace(result, output=str(out)), outputs)


@app.command()
@guarded
def design(
    *,
    settings: DesignSettings,
    html: Html = None,
    figure: Figure = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare the bounds, expected pieces, switches and ties of a layer at each granularity.

    Nothing but --measure is random: there --seed draws the pairs of tokens.
    """
    outputs = Outputs(html, json_to, figure, overwrite=overwrite, page_package="matplotlib")
    outputs.check_targets(settings.model, settings.text)
    with progress_bars(first_stage="loading the libraries") as progress:
        with uncollected_imports():
            from tieline.lab.on_model.design import design as run
            from tieline.lab.on_model.design import list_presets

        advice = None if settings.preset == "list" else run(settings=settings, progress=progress)
    if advice is None:
        print("\n".join(list_presets()))
    else:
        deliver(advice, outputs)


@app.command()
@guarded
def train(
    *,
    recipe: Annotated[
        str | None, typer.Argument(help="Name of a recipe; --list shows them.", metavar="RECIPE")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the run; by default runs/RECIPE-SEED."),
    ] = None,
    settings: TrainSettings,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show size, data and time of the run, train nothing.")
    ] = False,
    list_recipes: Annotated[
        bool, typer.Option("--list", help="Show the recipes in groups.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="With --list: show every recipe.")] = False,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a model by a recipe: language, images or sentence pairs, with any of the gates.

    Started by torchrun, the processes train one model together: each has the whole model and an
    equal share of every batch.
    """
    outputs = Outputs(html, json_to, extended=out, overwrite=overwrite, page_package="matplotlib")
    outputs.check_targets()
    if list_recipes:
        from tieline.lab.training.recipes import recipe_list

        deliver(recipe_list(in_full=every), outputs)
        return
    require(not every, "--all is for --list")
    require(recipe is not None, "name a recipe; `tieline train --list` shows them")
    with progress_bars(first_stage="loading the libraries"), uncollected_imports():
        from tieline.core.collectives import FirstRankError
        from tieline.lab import training
        from tieline.lab.training.recipes import with_cooling
        from tieline.lab.training.training_run import training_plan
        from tieline.models.saved_models import quiet_transformers
    quiet_transformers()
    config = with_cooling(str(recipe), settings)
    with progress_bars(first_stage="loading the data") as progress:
        try:
            if dry_run:
                result = training_plan(config, progress)
            else:
                result = training.train(config, out, settings=settings, progress=progress)
        except FirstRankError:
            time.sleep(FIRST_RANK_GRACE)
            raise typer.Exit(BAD_INPUT) from None  # one message is enough: rank 0 prints it
    if result is not None:  # only the first process has a result
        deliver(result, outputs)


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
    outputs.check_targets()
    with progress_bars(first_stage="loading the libraries"), uncollected_imports():
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
    print_to_stderr(f"{case.plan.name}: about {duration(seconds, 1)}")
    with progress_bars(first_stage="fits") as progress:
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
    outputs.check_targets()
    require(show or not every, "--all is for --list")
    names = claims or ["all"]
    with progress_bars(first_stage="loading the claims"):
        with uncollected_imports():
            from tieline.lab import claims as ledgers

        chosen = ledgers.select(names)
    if show:
        deliver(ledgers.Catalogue.of(chosen, in_full=every), outputs)
        return
    print_to_stderr(_reproduction_plan(chosen, settings))
    with progress_bars(first_stage="claims") as progress:
        ledger = ledgers.reproduce(
            names, settings=settings, progress=lambda done, total: progress("claims", done, total)
        )
    deliver(ledger, outputs)
    if ledger.broken:
        print_to_stderr(f"this is a bug of tieline: tests broke: {', '.join(ledger.broken)}")
        raise typer.Exit(OUR_BUG)
    if ledger.changed:
        print_to_stderr(f"failed: verdicts changed: {', '.join(ledger.changed)}")
        raise typer.Exit(CONDITION_HELD)


def _reproduction_plan(claims: "Sequence[Claim]", settings: ReproduceSettings) -> str:
    """Return a sentence on what is tested and the estimated time."""
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
    """Estimate the seconds of the tests: their share per process, at least the longest test."""
    each = [claim.duration(fast) for claim in claims]
    return float(math.ceil(max(sum(each) / processes, *each)))
