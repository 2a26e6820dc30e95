"""tieline design: what a number of experts, active experts and width buys."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tieline.cli.app import Debug, Json, Seed, app, guarded, say
from tieline.core.errors import ParameterError, require
from tieline.core.files import check_targets, json_target, write_whole
from tieline.report.outputs import to_json

__all__ = ["design"]

FORMAT = "tieline-design"
HIDDEN = 2048


@app.command()
@guarded
def design(
    experts: Annotated[int | None, typer.Option(help="Routed experts N.")] = None,
    topk: Annotated[int | None, typer.Option(help="Experts chosen per token, k.")] = None,
    expert_width: Annotated[int | None, typer.Option(help="Hidden width H of one expert.")] = None,
    d_eff: Annotated[
        int, typer.Option(help="Effective dimension of the inputs; 10 to 20 is usual.", min=1)
    ] = 16,
    split: Annotated[
        str, typer.Option(help="Granularities m: mN experts, mk chosen, width H/m.")
    ] = "1,2,4,8",
    preset: Annotated[
        str | None, typer.Option(help="A published shape, such as olmoe; 'list' names them.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Take the shape from the configuration of this folder or hub id."),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help=f"Width of the model; {HIDDEN} if nothing tells it.")
    ] = None,
    shared: Annotated[
        int | None, typer.Option(help="Shared experts that every token uses.", min=0)
    ] = None,
    matrices: Annotated[
        int, typer.Option(help="Weight matrices of an expert: 3 with a gate, 2 without.")
    ] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the page, design.html.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Write the plot: .pdf, .png or .svg.")] = None,
    json_to: Json = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with MODEL run.")
    ] = False,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Bounds, expected pieces, switches and ties of a layer at each granularity, side by side.

    Nothing is drawn at random: --seed is accepted, as by every command, and changes nothing.
    """
    splits = _splits(split)
    _check_targets(out, figure, json_to)
    given = {"n_experts": experts, "k": topk, "width": expert_width}
    others = {"hidden": hidden, "shared": shared}
    if preset == "list":
        print(_presets())
        return
    shape, source = _shape(given, others, matrices, preset, model, revision, trust_remote_code)
    from tieline.tropical.advisor import advise

    advice = advise(shape, d_eff, splits, source).to_dict()
    _write(advice, out, figure, json_to)
    _show(advice, json_to)


def _shape(
    given: dict[str, int | None],
    others: dict[str, int | None],
    matrices: int,
    preset: str | None,
    model: str | None,
    revision: str | None,
    trust: bool,
) -> tuple[Any, str]:
    """The layer and where its shape comes from: numbers, a preset or a model, never two of them."""
    from tieline.tropical.advisor import PRESETS, LayerShape

    named = [value for value in given.values() if value is not None]
    sources = [bool(named), preset is not None, model is not None]
    require(
        sum(sources) == 1,
        "say which layer: --experts, --topk and --expert-width, or --preset, or --model",
    )
    extra = {name: value for name, value in others.items() if value is not None}
    if preset is not None:
        require(preset in PRESETS, f"no preset {preset!r}: one of {', '.join(PRESETS)}")
        return _changed(PRESETS[preset], extra), preset
    if model is not None:
        from tieline.hf.loading import read_shape

        found = read_shape(model, revision=revision, trust_remote_code=trust)
        return _changed(LayerShape(**found._asdict(), matrices=matrices), extra), model
    missing = [name for name, value in given.items() if value is None]
    options = {"n_experts": "--experts", "k": "--topk", "width": "--expert-width"}
    require(not missing, f"also give {', '.join(options[name] for name in missing)}")
    numbers = {name: value for name, value in given.items() if value is not None}
    extra = {"hidden": HIDDEN} | extra
    return LayerShape(**numbers, **extra, matrices=matrices), "the given layer"


def _changed(shape: Any, extra: dict[str, int]) -> Any:
    from dataclasses import replace

    return replace(shape, **extra)


def _splits(words: str) -> list[int]:
    try:
        found = [int(part) for part in words.split(",")]
    except ValueError as problem:
        raise ParameterError(f"--split takes numbers such as 1,2,4,8, got {words!r}") from problem
    require(min(found) >= 1, f"--split takes numbers from 1 on, got {words!r}")
    return found


def _presets() -> str:
    from tieline.tropical.advisor import PRESETS

    return "\n".join(
        f"{name:16} {s.k} of {s.n_experts} experts, width {s.width}, model width {s.hidden}"
        for name, s in PRESETS.items()
    )


def _check_targets(out: Path | None, figure: Path | None, json_to: str | None) -> None:
    from tieline.report.figures import check_figure_path

    check_targets(out, figure, json_target(json_to))
    if figure is not None:
        check_figure_path(figure)


def _write(
    advice: dict[str, Any], out: Path | None, figure: Path | None, json_to: str | None
) -> None:
    """Every file, after all have been made in memory."""
    made: list[tuple[Path, bytes]] = []
    if out is not None:
        from tieline.report.design_page import design_page_bytes

        made.append((out, design_page_bytes(advice)))
    if figure is not None:
        from tieline.report.design_figure import design_figure_bytes

        made.append((figure, design_figure_bytes(advice, figure)))
    if (target := json_target(json_to)) is not None:
        made.append((target, to_json(advice, FORMAT).encode()))
    for path, data in made:
        write_whole(path, data)
        say(f"wrote {path}")


def _show(advice: dict[str, Any], json_to: str | None) -> None:
    from tieline.report.design_table import design_view

    if json_to == "-":
        sys.stdout.write(to_json(advice, FORMAT))
    else:
        Console(highlight=False, soft_wrap=False).print(design_view(advice))
