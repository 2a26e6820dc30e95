"""tieline check ROUTES ...: whether files of routes are sound."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import (
    CONDITION_HELD,
    Debug,
    Device,
    Html,
    Json,
    Overwrite,
    Seed,
    app,
    guarded,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars

Layers = Annotated[
    int | None, typer.Option(help="Layers of the array, for SGLang, which does not say.", min=1)
]
PerToken = Annotated[
    int | None,
    typer.Option("-k", "--k", help="Experts per token, for files that do not say.", min=1),
]
Experts = Annotated[int | None, typer.Option(help="Number of experts of the model.", min=1)]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="vllm, sglang, tensorrt-llm, megatron, megatron-trace, verl, nemo, slime, miles, "
        "moe-trace, table or array; by default recognised by content.",
    ),
]
Tokens = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        help="Token ids: .npy of (tokens,) or (documents, length), .npz, .safetensors or JSON.",
    ),
]
Start = Annotated[int | None, typer.Option(help="Position of the first row.", min=0)]


@app.command()
@guarded
def check(
    routes: Annotated[
        list[str],
        typer.Argument(help="Files of routes, or folders of traces.", metavar="ROUTES ..."),
    ],
    model: Annotated[
        str | None, typer.Option(help="A model that routes a sample to compare with.")
    ] = None,
    tokens: Tokens = None,
    against: Annotated[
        str | None, typer.Option(help="Routes of the same tokens that are right.")
    ] = None,
    n_experts: Experts = None,
    k: PerToken = None,
    layers: Layers = None,
    start: Start = None,
    format_: Format = None,
    device: Device = "cpu",
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Check whether files of routes are sound; exit with 1 if one is not.

    Nothing is drawn at random: --seed is accepted, as by every command, and changes nothing.
    """
    outputs = Outputs(html, json_to, overwrite=overwrite, page_package="jinja2")
    outputs.check(*routes, tokens, against, model)
    with progress_bars(first="check"):
        from tieline.analysis.check import check as run
        from tieline.analysis.sources import quiet_transformers

        quiet_transformers()
        result = run(
            routes,
            model=model,
            tokens=tokens,
            against=against,
            n_experts=n_experts,
            k=k,
            layers=layers,
            start=start,
            format=format_,
            device=device,
        )
    deliver(result, outputs)
    if not result.sound:
        raise typer.Exit(CONDITION_HELD)
