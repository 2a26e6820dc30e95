"""Commands that ask a question of a model: `tieline soften [MODEL]` and its likes.

soften      what a soft choice of experts does to the loss of a model
slice       the plane through three tokens' hidden states at one router
walks       how many roundings until a token changes its experts
attention   a model's attention heads as mixtures of keys
frontier    how much repair smoothing buys, at which price, width by width
reroute     another router, fitted to the choices of the model's own
upcycle     a dense model turned into a Mixture of Experts
design      what a number of experts, active experts and expert width buys
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars, run_job
from tieline.cli.options import Figure, Html, Json, ModelName, Overwrite
from tieline.lab.command_settings import (
    AttentionSettings,
    DesignSettings,
    FrontierSettings,
    RerouteSettings,
    SliceSettings,
    SoftenSettings,
    UpcycleSettings,
    WalksSettings,
)


def add_question(
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
        outputs = Outputs(html, json_to, figure, overwrite=overwrite, page_package=page_package)
        outputs.check(model, settings.text)
        result = run_job(job, model, settings=settings)
        deliver(result, outputs, "add --html page.html for the page")

    command.__name__, command.__doc__ = name, purpose
    command.__annotations__["settings"] = settings_class
    app.command(name)(guarded(command))


add_question(
    "soften",
    SoftenSettings,
    "tieline.lab.on_model.soften:soften",
    "Measure and predict what a soft choice does to the loss, layer by layer.",
)
add_question(
    "slice",
    SliceSettings,
    "tieline.lab.on_model.slice:slice_model",
    "Draw the plane through three tokens' hidden states at one router, and check it.",
    "jinja2",
)
add_question(
    "walks",
    WalksSettings,
    "tieline.lab.on_model.walks:walks",
    "Simulate how long tokens keep their experts as the noise of bf16 collects.",
)
add_question(
    "attention",
    AttentionSettings,
    "tieline.lab.attention.view:attention_view",
    "Look at attention heads as mixtures of keys, and at what sigmoid attention would change.",
    "matplotlib",
)
add_question(
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
    outputs.check(model, settings.text, settings.fit)
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
    outputs.check(model, settings.text)
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
    outputs.check(settings.model, settings.text)
    with progress_bars(first="loading the libraries") as progress:
        from tieline.lab.on_model.design import design as run
        from tieline.lab.on_model.design import list_presets

        advice = None if settings.preset == "list" else run(settings=settings, progress=progress)
    if advice is None:
        print("\n".join(list_presets()))
    else:
        deliver(advice, outputs)
