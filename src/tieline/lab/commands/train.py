"""tieline train RECIPE: train a small or large model by a named recipe, and score it."""

import time
from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import BAD_INPUT, app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Html, Json, Overwrite
from tieline.core.errors import require
from tieline.lab.command_settings import TrainSettings

GRACE = 2.0
"""Seconds for rank 0 to print its error: torchrun ends all processes when one has ended."""


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
    outputs.check()
    if list_recipes:
        from tieline.lab.training.recipes import recipe_list

        deliver(recipe_list(in_full=every), outputs)
        return
    require(not every, "--all is for --list")
    require(recipe is not None, "name a recipe; `tieline train --list` shows them")
    with progress_bars(first="loading the libraries"):
        from tieline.core.collectives import FirstRankError
        from tieline.lab import training
        from tieline.lab.training.recipes import recipe_config
        from tieline.lab.training.training_run import training_plan
        from tieline.models.checkpoint import quiet_transformers
    quiet_transformers()
    config = recipe_config(str(recipe), settings.seed)
    with progress_bars(first="loading the data") as progress:
        try:
            if dry_run:
                result = training_plan(config, progress)
            else:
                result = training.train(config, out, settings=settings, progress=progress)
        except FirstRankError:
            time.sleep(GRACE)
            raise typer.Exit(BAD_INPUT) from None  # one message is enough: rank 0 prints it
    if result is not None:  # only the first process has a result
        deliver(result, outputs)
