"""tieline inspect [MODEL]: how near a model's tokens are to a routing tie."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tieline.cli.app import CONDITION_HELD, Debug, Json, Seed, app, guarded, say
from tieline.cli.input import layer_choice, read_text
from tieline.cli.models import load
from tieline.cli.progress import progress_bars
from tieline.report.conditions import Condition, check_names, held, metric_names, parse_condition
from tieline.report.numbers import significant
from tieline.report.outputs import Outputs, to_json
from tieline.report.terminal import inspection_view

__all__ = ["inspect"]


@app.command()
@guarded
def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder or hub id; without it, the model in the box.", metavar="MODEL"),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to route, UTF-8; by default one in the box.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of it.", min=1)] = 16384,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass.", min=1)] = 8,
    dtype: Annotated[
        str, typer.Option(help="auto, fp32, bf16 or fp16: the precision the model runs in.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")] = "cpu",
    layers: Annotated[
        str | None, typer.Option(help="Routed layers, such as 0,2,5-7, or names of routers.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write the page, report.html.")] = None,
    json_to: Json = None,
    figure: Annotated[
        Path | None, typer.Option(help="Write a figure for papers: .pdf, .png or .svg.")
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Save the routing itself in a new folder.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Leave with 1 if this holds, 'flip@bf16>0.02'; may be given often."),
    ] = None,
    loss_jumps: Annotated[
        bool, typer.Option("--loss-jumps", help="Also measure what flips do to the loss.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with MODEL run.")
    ] = False,
    debug: Debug = False,
) -> None:
    """How near a model's tokens are to a routing tie, in which layers, and what a flip costs."""
    conditions = [parse_condition(words) for words in fail_if or []]
    outputs = Outputs(out, json_to, figure, save_trace)
    outputs.check()
    chosen = layer_choice(layers)
    words, source = read_text(text) if text else ("", "shipped")
    check_names(conditions, _known_metrics(loss_jumps))
    loaded = load(model, revision, dtype, device, trust_remote_code)
    with progress_bars() as progress:
        result, trace = _inspect(
            loaded,
            words,
            source=source,
            tokens=tokens,
            batch_size=batch_size,
            layers=chosen,
            seed=seed,
            loss_jumps=loss_jumps,
            progress=progress,
        )
        outputs.write(result, trace)
    _show(result, outputs)
    _judge(conditions, result["metrics"])


def _known_metrics(loss_jumps: bool) -> set[str]:
    from tieline.geometry.measure_records import MeasureSettings

    grid = MeasureSettings()
    known = metric_names(grid.precisions, grid.sigmas, grid.probabilities)
    return known if loss_jumps else known - {"loss"}


def _inspect(loaded: Any, text: str, **options: Any) -> tuple[dict[str, Any], Any]:
    from tieline.analysis.inspect import inspect_model
    from tieline.hf.shipped import shipped_text

    done = inspect_model(loaded.model, loaded.tokenizer, text or shipped_text(), **options)
    result: dict[str, Any] = done.inspection.to_dict()
    result["provenance"] |= {"model": loaded.name}
    return result, done.trace


def _show(result: dict[str, Any], outputs: Outputs) -> None:
    """The result in the terminal, or as JSON where stdout is asked for."""
    if outputs.to_stdout:
        sys.stdout.write(to_json(result))
    else:
        console = Console(highlight=False, soft_wrap=False)
        console.print(inspection_view(result, console.width))
    for path in outputs.files:
        say(f"wrote {path}")
    if not outputs.files and not outputs.to_stdout:
        say("add --out report.html for the page with charts")


def _judge(conditions: list[Condition], metrics: dict[str, float]) -> None:
    found = held(conditions, metrics)
    for condition, value in found:
        say(f"failed: {condition.text} ({condition.metric} is {significant(value, 4)})")
    if found:
        raise typer.Exit(CONDITION_HELD)
