"""tieline design: what a number of experts, active experts and expert width buys."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tieline.cli.app import (
    Debug,
    Html,
    Json,
    Overwrite,
    Revision,
    Seed,
    TextFile,
    TrustRemoteCode,
    app,
    guarded,
    numbers,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.core.errors import require

if TYPE_CHECKING:
    from tieline.lab.tropical.advisor import LayerShape


HIDDEN = 2048


@app.command()
@guarded
def design(
    n_experts: Annotated[
        int | None, typer.Option("--n-experts", help="Number of routed experts N.")
    ] = None,
    topk: Annotated[int | None, typer.Option(help="Experts chosen per token, k.")] = None,
    expert_width: Annotated[
        int | None, typer.Option(help="Hidden neurons H of one expert.")
    ] = None,
    d_eff: Annotated[
        int, typer.Option(help="Effective dimension of the inputs, usually 10 to 20.", min=1)
    ] = 16,
    split: Annotated[
        str, typer.Option(help="Granularities m: mN experts, mk chosen, width H/m.")
    ] = "1,2,4,8",
    preset: Annotated[
        str | None, typer.Option(help="A published shape, such as olmoe; 'list' shows all.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Read the shape from the configuration of a folder or hub id."),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help=f"Width of the model; {HIDDEN} if not known otherwise.")
    ] = None,
    shared: Annotated[
        int | None, typer.Option(help="Shared experts that every token uses.", min=0)
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run --model on a text and measure its layers.")
    ] = False,
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to run.", min=3)] = 4096,
    matrices: Annotated[
        int, typer.Option(help="Weight matrices of an expert: 3 with a gate, 2 without.")
    ] = 3,
    html: Html = None,
    figure: Annotated[Path | None, typer.Option(help="Write the plot: .pdf, .png or .svg.")] = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Compare the bounds, expected pieces, switches and ties of a layer at each granularity.

    Nothing but --measure is random: there --seed draws the pairs of tokens.
    """
    require(not measure or model is not None, "--measure runs a model: name it with --model")
    splits = numbers("--split", split, int) or ()
    require(min(splits) >= 1, f"--split takes numbers from 1 on, got {split!r}")
    outputs = Outputs(html, json_to, figure, overwrite=overwrite, page_package="matplotlib")
    outputs.check(model, text)
    from tieline.lab.tropical.advisor import PRESETS, advise

    if preset == "list":
        print("\n".join(f"{name:16} {_described(shape)}" for name, shape in PRESETS.items()))
        return
    given = {"--n-experts": n_experts, "--topk": topk, "--expert-width": expert_width}
    chosen = [any(value is not None for value in given.values()), bool(preset), bool(model)]
    require(
        sum(chosen) == 1,
        "say which layer: --n-experts, --topk and --expert-width, or --preset, or --model",
    )
    if preset:
        require(preset in PRESETS, f"no preset {preset!r}: one of {', '.join(PRESETS)}")
        shape, source = PRESETS[preset], preset
    elif model:
        shape, source = _shape_of_model(model, matrices, revision, trust_remote_code), model
    else:
        shape, source = _given_shape(given, matrices), "the given layer"
    changes = {"hidden": hidden, "shared": shared}
    shape = replace(shape, **{name: new for name, new in changes.items() if new is not None})
    with progress_bars() as progress:
        advice = advise(shape, d_eff, splits, source, progress)
        if measure:
            from tieline.lab.on_model.design import measure_design

            options = {"revision": revision, "trust_remote_code": trust_remote_code, "seed": seed}
            found = measure_design(source, text=text, tokens=tokens, progress=progress, **options)
            advice = replace(advice, measured=found)
    deliver(advice, outputs)


def _shape_of_model(
    model: str, matrices: int, revision: str | None, trust_remote_code: bool
) -> "LayerShape":
    from tieline.lab.tropical.advisor import LayerShape
    from tieline.models.loading import read_shape

    found = read_shape(model, revision=revision, trust_remote_code=trust_remote_code)
    return LayerShape(**found._asdict(), matrices=matrices)


def _given_shape(given: dict[str, int | None], matrices: int) -> "LayerShape":
    from tieline.lab.tropical.advisor import LayerShape

    missing = [name for name, value in given.items() if value is None]
    require(not missing, f"also give {', '.join(missing)}")
    n, k, width = (value for value in given.values() if value is not None)
    return LayerShape(n, k, width, HIDDEN, matrices=matrices)


def _described(shape: "LayerShape") -> str:
    return (
        f"{shape.k} of {shape.n_experts} experts, width {shape.width}, model width {shape.hidden}"
    )
