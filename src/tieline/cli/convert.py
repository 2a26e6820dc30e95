"""tieline convert IN OUT --to FORM: routes in the form of another program."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import Debug, Json, Overwrite, Seed, app, guarded
from tieline.cli.check import Experts, Format, Layers, PerToken, Start, Tokens
from tieline.cli.deliver import Outputs, deliver, progress_bars


@app.command()
@guarded
def convert(
    source: Annotated[str, typer.Argument(help="Routes in any form, or a trace.", metavar="IN")],
    output: Annotated[Path, typer.Argument(help="The file or folder to make.", metavar="OUT")],
    to: Annotated[
        str, typer.Option("--to", help="vllm, sglang, verl, megatron, nemo, npz or trace.")
    ],
    tokens: Tokens = None,
    n_experts: Experts = None,
    k: PerToken = None,
    layers: Layers = None,
    start: Start = None,
    format_: Format = None,
    model_layers: Annotated[
        int | None,
        typer.Option(help="Layers of the model, for forms that count dense layers.", min=1),
    ] = None,
    overwrite: Overwrite = False,
    json_to: Json = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Read routes of any producer and write them in the form of another.

    Nothing is drawn at random: --seed is accepted, as by every command, and changes nothing.
    """
    outputs = Outputs(json=json_to, kept=output, overwrite=overwrite)
    outputs.check(source, tokens)
    with progress_bars(first="convert"):
        from tieline.analysis.convert import convert as run

        result = run(
            source,
            output,
            to=to,
            tokens=tokens,
            n_experts=n_experts,
            k=k,
            layers=layers,
            start=start,
            format=format_,
            model_layers=model_layers,
            overwrite=overwrite,
        )
    deliver(result, outputs)
