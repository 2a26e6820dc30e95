"""tieline smooth [MODEL] -o OUT: make routing continuous at ties, and measure what that repairs."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import (
    BatchSize,
    Debug,
    Device,
    Html,
    Json,
    Keep,
    Memory,
    ModelName,
    Overwrite,
    Revision,
    Seed,
    Stream,
    TextFile,
    TrustRemoteCode,
    app,
    guarded,
    memory_size,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.ranks import Parallel, joined
from tieline.core.errors import require


@app.command()
@guarded
def smooth(
    model: ModelName = "demo",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder for the smoothed model.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Mean experts per token, above k; k + 0.5 by default."),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            help="Make the ramp wide against a precision: bf16, int8, 'router bf16', ...; with "
            "--factor or --max-moved the precision to repair ('router bf16')."
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Width of the band in units of the scores, all layers.")
    ] = None,
    factor: Annotated[
        float | None,
        typer.Option(help="Make flips under --noise so many times cheaper; tells what moved."),
    ] = None,
    max_moved: Annotated[
        float | None,
        typer.Option(help="Stay within this KL of the original, nats per token."),
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(
            help="projected: tied experts share a seat; ramp: experts below the threshold are "
            "added. By default projected, but ramp with -a, -b or --k-max."
        ),
    ] = None,
    a: Annotated[float, typer.Option("-a", help="Exponent at the lower end of the ramp.")] = 1.0,
    b: Annotated[
        float, typer.Option("-b", help="Exponent at its upper end: 1 is straight, 50 the paper's.")
    ] = 1.0,
    k_max: Annotated[int | None, typer.Option(help="Slots per token of the ramp.")] = None,
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="Tokens to measure on.", min=64)] = 16384,
    calibration: Annotated[
        int, typer.Option(help="Tokens before those, to choose ε on.", min=64)
    ] = 4096,
    batch_size: BatchSize = 8,
    rounds: Annotated[int, typer.Option(help="Rounds to measure time in.", min=2)] = 12,
    experts_impl: Annotated[
        str | None,
        typer.Option(
            help="Experts to measure time with: tieline, grouped_mm, eager, ...; by default those "
            "of the model, and tieline for the smoothed one."
        ),
    ] = None,
    device: Device = "cpu",
    revision: Revision = None,
    seed: Seed = 0,
    html: Html = None,
    json_to: Json = None,
    stream: Stream = None,
    memory: Memory = None,
    keep: Keep = True,
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    parallel: Parallel = None,
    debug: Debug = False,
) -> None:
    """Make routing continuous at ties instead of top-k, and measure what that repairs and costs."""
    outputs = Outputs(html, json_to, made=out, overwrite=overwrite)
    outputs.check(model, text)
    wishes = {"--epsilon": epsilon, "--factor": factor, "--max-moved": max_moved}
    _check_wishes(wishes | {"--budget": budget}, noise)
    with progress_bars() as progress, joined(parallel, "smoothing") as way:
        from tieline.analysis.smooth import smooth as run
        from tieline.analysis.sources import quiet_transformers
        from tieline.models.smooth import gate_named

        quiet_transformers()
        result = run(
            model,
            budget=budget,
            noise=noise,
            epsilon=epsilon,
            factor=factor,
            max_moved=max_moved,
            gate=gate_named(gate),
            a=a,
            b=b,
            k_max=k_max,
            text=text,
            tokens=tokens,
            calibration=calibration,
            batch_size=batch_size,
            rounds=rounds,
            experts_impl=experts_impl,
            seed=seed,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            stream=stream,
            memory=memory_size(memory),
            keep=keep,
            parallel=way,
            progress=progress,
        )
    deliver(result, outputs, "add -o FOLDER to save the smoothed model")


def _check_wishes(wishes: dict[str, float | None], noise: str | None) -> None:
    """Refuse two ways to choose ε."""
    given = [name for name, value in wishes.items() if value is not None]
    require(len(given) <= 1, f"{' and '.join(given)} each choose ε: give one of them")
    alone = given != ["--epsilon"] or noise is None
    require(alone, "--epsilon goes with no other choice of ε: leave out --noise")
