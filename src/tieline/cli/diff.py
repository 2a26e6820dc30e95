"""tieline diff A B: do two runs route alike and, if not, why."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tieline.cli.app import CONDITION_HELD, Debug, Json, Seed, app, guarded, say
from tieline.cli.diff_sides import Sources, compare_sources
from tieline.cli.progress import progress_bars
from tieline.core.errors import ParameterError, require
from tieline.core.files import check_targets, json_target, write_whole
from tieline.report.diff_page import diff_page_bytes
from tieline.report.diff_terminal import diff_view
from tieline.report.numbers import percent
from tieline.report.outputs import to_json

__all__ = ["diff"]

FORMAT = "tieline-diff"
Source = "Folder of a trace, file of an engine (.npy, .npz, .safetensors, .csv, .jsonl), or model."
Precision = "auto, fp32, bf16 or fp16; or bf16-emulated, int8-emulated, ...: computed in fp32."


@app.command()
@guarded
def diff(
    a: Annotated[str, typer.Argument(help=f"{Source} 'shipped' is the one in the box.")],
    b: Annotated[str, typer.Argument(help="The same for the other side.")],
    text: Annotated[
        Path | None, typer.Option(help="Text that models run on, UTF-8; by default one in the box.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of it.", min=1)] = 16384,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.", min=2)] = 512,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass.", min=1)] = 8,
    dtype_a: Annotated[str, typer.Option(help=Precision)] = "auto",
    dtype_b: Annotated[str, typer.Option(help="The same for B.")] = "auto",
    experts_a: Annotated[
        str | None, typer.Option(help="Expert implementation of A: eager, grouped_mm, ...")
    ] = None,
    experts_b: Annotated[str | None, typer.Option(help="The same for B.")] = None,
    revision_a: Annotated[str | None, typer.Option(help="Branch, tag or commit of A.")] = None,
    revision_b: Annotated[str | None, typer.Option(help="The same for B.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")] = "cpu",
    n_experts: Annotated[
        int | None, typer.Option(help="Number of experts, for files that do not tell.", min=1)
    ] = None,
    k: Annotated[
        int | None, typer.Option("-k", "--k", help="Experts chosen per line of a table.", min=1)
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Compare what both have: fewer tokens, smaller k.")
    ] = False,
    max_flip: Annotated[
        str | None, typer.Option(help="Leave with 1 if more tokens flip in a layer: 0.01 or 1%.")
    ] = None,
    max_unexplained: Annotated[
        str | None,
        typer.Option(help="Leave with 1 if more tokens of a layer flip outside the tie band."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page, diff.html.")] = None,
    json_to: Json = None,
    seed: Seed = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with models run.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Whether two runs choose the same experts, in which layers not, and whether ties explain it.

    Nothing is drawn at random: --seed is accepted, as by every command, and changes nothing.
    """
    limits = {"flip": _share("--max-flip", max_flip)}
    limits["unexplained"] = _share("--max-unexplained", max_unexplained)
    page, target = out, json_target(json_to)
    _check_outputs(page, target)
    sources = Sources(
        (a, b),
        (dtype_a, dtype_b),
        (experts_a, experts_b),
        (revision_a, revision_b),
        device=device,
        trust=trust_remote_code,
        n_experts=n_experts,
        k=k,
    )
    with progress_bars() as progress:
        result = compare_sources(
            sources, text, tokens, sequence_length, batch_size, partial, progress
        )
    _check_limits(limits, result)
    made = [(page, diff_page_bytes(result))] if page else []
    made += [(target, to_json(result, FORMAT).encode())] if target else []
    for path, data in made:
        write_whole(path, data)
    _show(result, json_to == "-", [path for path, _ in made])
    _judge(limits, result["metrics"])


def _share(option: str, words: str | None) -> float | None:
    """A share between 0 and 1 from 0.01 or 1%."""
    if words is None:
        return None
    try:
        number = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        raise ParameterError(f"{option}: write a share such as 0.01 or 1%, got {words!r}") from None
    require(0 <= number <= 1, f"{option}: a share lies between 0 and 1, got {words!r}")
    return number


def _check_outputs(page: Path | None, target: Path | None) -> None:
    check_targets(page, target)
    if page is not None and find_spec("plotly") is None:
        raise ModuleNotFoundError(f"{page} needs plotly", name="plotly")


def _check_limits(limits: dict[str, float | None], result: dict[str, Any]) -> None:
    """Refuse a limit on what the inputs cannot tell, before anything is written."""
    if limits["unexplained"] is not None and "unexplained" not in result["metrics"]:
        blind = next(x for x in result["layers"] if x["attribution"] is None)
        status = blind["attribution_status"]
        raise ParameterError(f"--max-unexplained: layer {blind['name']!r} is {status}")


def _show(result: dict[str, Any], to_stdout: bool, files: list[Path]) -> None:
    if to_stdout:
        sys.stdout.write(to_json(result, FORMAT))
    else:
        console = Console(highlight=False, soft_wrap=False)
        console.print(diff_view(result, console.width))
    for path in files:
        say(f"wrote {path}")
    if not files and not to_stdout:
        say("add --out diff.html for the page with charts")


def _judge(limits: dict[str, float | None], metrics: dict[str, float]) -> None:
    failed = False
    for name, most in limits.items():
        if most is not None and metrics[name] > most:
            failed = True
            say(
                f"failed: --max-{name} {percent(most)} (the worst layer has "
                f"{percent(metrics[name])})"
            )
    if failed:
        raise typer.Exit(CONDITION_HELD)
