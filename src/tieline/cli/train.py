"""tieline train RECIPE: train a small or large model by a named recipe, and score it."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tieline.cli.app import BAD_INPUT, Debug, Json, Seed, app, guarded, say
from tieline.cli.progress import progress_bars
from tieline.core.errors import require
from tieline.core.files import write_whole
from tieline.report.outputs import Outputs, to_json
from tieline.report.training_table import plan_lines, recipe_lines, result_lines

__all__ = ["train"]

GRACE = 2.0
"""Seconds for rank 0 to tell why: torchrun ends all processes as soon as one has ended."""


@app.command()
@guarded
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="Name of a recipe; --list shows all.", metavar="RECIPE")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default runs/RECIPE-SEED.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of the folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show size, data and time of the run, train nothing.")
    ] = False,
    expert_ranks: Annotated[
        int | None,
        typer.Option(help="Under torchrun: processes that share the experts of a layer.", min=1),
    ] = None,
    list_recipes: Annotated[bool, typer.Option("--list", help="Show the recipes.")] = False,
    seed: Seed = 0,
    json_to: Json = None,
    debug: Debug = False,
) -> None:
    """Train a model by a recipe: language, images or sentence pairs, with any of the gates.

    Started by torchrun, the processes train together: experts spread over them, the rest cut.
    """
    outputs = Outputs(json=json_to)
    outputs.check()
    from tieline.training.recipes import recipe_config, recipe_list

    if list_recipes:
        found = recipe_list()
        _show(found.to_dict(), recipe_lines(found.recipes), outputs)
        return
    require(recipe is not None, "name a recipe; `tieline train --list` shows all")
    config = recipe_config(str(recipe), seed)
    if dry_run:
        _dry_run(config, outputs)
    else:
        folder = out or Path("runs") / f"{recipe}-{seed}"
        _run(config, folder, resume, expert_ranks, outputs)


def _dry_run(config: Any, outputs: Outputs) -> None:
    from tieline.training.engine import plan

    with progress_bars() as progress:
        found = plan(config, progress).to_dict()
    _show(found, plan_lines(found), outputs)


def _run(
    config: Any, folder: Path, resume: bool, expert_ranks: int | None, outputs: Outputs
) -> None:
    from tieline.training.engine import run
    from tieline.training.parallel.processes import FirstRankError, is_parallel
    from tieline.training.parallel.run import run_parallel

    parallel = is_parallel()
    possible = parallel or expert_ranks in (None, 1)
    require(possible, "--expert-ranks needs processes: start with torchrun")
    with progress_bars() as progress:
        options: dict[str, Any] = {"resume": resume, "progress": progress}
        try:
            if parallel:
                found = run_parallel(config, folder, expert_ranks=expert_ranks, **options)
            else:
                found = run(config, folder, **options)
        except FirstRankError:
            time.sleep(GRACE)
            raise typer.Exit(BAD_INPUT) from None  # one message is enough: rank 0 tells it
    if found is not None:  # only the first process has a result to show
        result = found.to_dict()
        _show(result, result_lines(result), outputs)


def _show(found: dict[str, Any], lines: list[str], outputs: Outputs) -> None:
    if outputs.to_stdout:
        sys.stdout.write(to_json(found, "tieline-training"))
        return
    print("\n".join(lines))
    for path in outputs.files:
        write_whole(path, to_json(found, "tieline-training").encode())
        say(f"wrote {path}")
