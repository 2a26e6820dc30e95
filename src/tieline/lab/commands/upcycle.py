"""tieline upcycle MODEL -o OUT: turn a dense model into a Mixture of Experts."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import Debug, Json, Overwrite, Revision, Seed, app, guarded, layer_choice
from tieline.cli.deliver import Outputs, deliver, progress_bars


@app.command()
@guarded
def upcycle(
    model: Annotated[str, typer.Argument(help="Folder or hub id.", metavar="MODEL")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the mixture.")],
    n_experts: Annotated[int, typer.Option(help="Experts per layer.")] = 8,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 2,
    layers: Annotated[
        str | None, typer.Option(help="Feed-forward networks, such as 0,2,5-7; all by default.")
    ] = None,
    router_init: Annotated[str, typer.Option(help="normal or orthogonal.")] = "normal",
    router_scale: Annotated[float, typer.Option(help="Size of the router's entries.")] = 0.02,
    noise: Annotated[
        float, typer.Option(help="Noise on the copies, relative to their size; 0 for none.")
    ] = 0.0,
    text: Annotated[Path | None, typer.Option(help="Text to compare the loss on, UTF-8.")] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text.", min=2)] = 4096,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    revision: Revision = None,
    overwrite: Overwrite = False,
    seed: Seed = 0,
    json_to: Json = None,
    debug: Debug = False,
) -> None:
    """Copy a dense model's feed-forward networks into experts; the function stays, to rounding."""
    outputs = Outputs(json=json_to, made=out, overwrite=overwrite)
    outputs.check(model, text)
    chosen = layer_choice(layers)
    with progress_bars() as progress:
        from tieline.analysis.sources import quiet_transformers
        from tieline.lab.on_model.upcycle import upcycle as run

        quiet_transformers()
        result = run(
            model,
            n_experts=n_experts,
            k=topk,
            layers=chosen,
            router_init=router_init,
            router_scale=router_scale,
            noise=noise,
            text=text,
            tokens=tokens,
            dtype=dtype,
            revision=revision,
            seed=seed,
            progress=progress,
        )
    deliver(replace(result, output=str(out)), outputs)
