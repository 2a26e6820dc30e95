"""tieline diff A B: whether two runs route alike and, if not, why."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tieline.cli.app import (
    CONDITION_HELD,
    BatchSize,
    Debug,
    Device,
    Html,
    Json,
    Overwrite,
    Seed,
    TextFile,
    app,
    guarded,
    say,
    share,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.ranks import Parallel, is_first, joined
from tieline.core.errors import ParameterError

Source = (
    "Folder of a trace, file of an engine (.npy, .npz, .safetensors, .csv, .jsonl), model, or "
    "model in an engine: vllm:MODEL, mlx:MODEL, llama.cpp:FILE.gguf."
)
Precision = "auto, fp32, bf16 or fp16; or bf16-emulated, int8-emulated, ...: computed in fp32."


@app.command()
@guarded
def diff(
    a: Annotated[str, typer.Argument(help=f"{Source} 'demo' is the one in the box.")],
    b: Annotated[str, typer.Argument(help="The same for the other side.")],
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text.", min=1)] = 16384,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.", min=2)] = 512,
    batch_size: BatchSize = 8,
    dtype_a: Annotated[str, typer.Option(help=Precision)] = "auto",
    dtype_b: Annotated[str, typer.Option(help="The same for B.")] = "auto",
    experts_impl_a: Annotated[
        str | None, typer.Option(help="Expert implementation of A: eager, grouped_mm, ...")
    ] = None,
    experts_impl_b: Annotated[str | None, typer.Option(help="The same for B.")] = None,
    revision_a: Annotated[str | None, typer.Option(help="Branch, tag or commit of A.")] = None,
    revision_b: Annotated[str | None, typer.Option(help="The same for B.")] = None,
    device: Device = "cpu",
    n_experts: Annotated[
        int | None, typer.Option(help="Number of experts, for files that do not state it.", min=1)
    ] = None,
    k: Annotated[
        int | None, typer.Option("-k", "--k", help="Experts chosen per line of a table.", min=1)
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Compare what both have: fewer tokens, smaller k.")
    ] = False,
    expect: Annotated[
        str | None,
        typer.Option(
            help="Format whose noise is expected: fp32, bf16, fp16, fp8, int8, int4, ... By "
            "default what both sides recorded."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer cuts the text, for two GGUFs.")
    ] = None,
    engine_python: Annotated[
        Path | None, typer.Option(help="Python that the engine of a side is installed in.")
    ] = None,
    engine_defaults: Annotated[
        bool,
        typer.Option("--engine-defaults", help="All settings as engines have them by default."),
    ] = False,
    no_dequantise: Annotated[
        bool,
        typer.Option("--no-dequantise", help="Do not run dequantised weights in transformers."),
    ] = False,
    batch_b: Annotated[
        int | None, typer.Option(help="Sequences per pass of B: batch invariance.", min=1)
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Split the KL: A's experts, then its weights, replayed in B."
        ),
    ] = False,
    max_flip: Annotated[
        str | None,
        typer.Option(help="Exit with 1 if any layer's flip rate exceeds this: 0.01 or 1%."),
    ] = None,
    max_unexplained: Annotated[
        str | None,
        typer.Option(help="Exit with 1 if more of any layer's tokens flip beyond their noise."),
    ] = None,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
    seed: Seed = 0,
    stream: Annotated[
        bool, typer.Option("--stream", help="Read both models layer by layer, each byte once.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code that comes with models to run.")
    ] = False,
    parallel: Parallel = None,
    debug: Debug = False,
) -> None:
    """Compare which experts two runs choose, layer by layer, and whether ties explain differences.

    Nothing is drawn at random: --seed is accepted, as by every command, and changes nothing.
    """
    limits = _limits(max_flip, max_unexplained)
    outputs = Outputs(html, json_to, overwrite=overwrite)
    outputs.check(a, b, text)
    with progress_bars() as progress, joined(parallel, "comparing") as way:
        from tieline.analysis.diff import diff as run
        from tieline.analysis.sources import quiet_transformers

        quiet_transformers()
        result = run(
            a,
            b,
            text=text,
            tokens=tokens,
            sequence_length=sequence_length,
            batch_size=batch_size,
            dtype_a=dtype_a,
            dtype_b=dtype_b,
            experts_impl_a=experts_impl_a,
            experts_impl_b=experts_impl_b,
            revision_a=revision_a,
            revision_b=revision_b,
            device=device,
            trust_remote_code=trust_remote_code,
            stream=stream,
            n_experts=n_experts,
            k=k,
            partial=partial,
            expect=expect,
            tokenizer=tokenizer,
            engine_python=engine_python,
            engine_defaults=engine_defaults,
            dequantise=not no_dequantise,
            replay=replay,
            batch_b=batch_b,
            parallel=way,
            progress=progress,
        )
    _check_attributable(limits, result)
    deliver(result, outputs, "add --html diff.html for the page with charts")
    _judge(limits, result.metrics)


def _limits(flip: str | None, unexplained: str | None) -> dict[str, float | None]:
    """The shares that metrics must not exceed, by the name of the metric."""
    return {
        "flip": share("--max-flip", flip),
        "unexplained": share("--max-unexplained", unexplained),
    }


def _check_attributable(limits: dict[str, float | None], result: Any) -> None:
    """Refuse a limit on unexplained flips where they cannot be told."""
    if limits["unexplained"] is not None and "unexplained" not in result.metrics:
        blind = next(layer for layer in result.layers if layer.attribution is None)
        raise ParameterError(
            f"--max-unexplained: layer {blind.name!r} is {blind.attribution_status}"
        )


def _judge(limits: dict[str, float | None], metrics: dict[str, float]) -> None:
    from tieline.report.words.numbers import percent

    exceeded = {n: most for n, most in limits.items() if most is not None and metrics[n] > most}
    for name, most in exceeded.items() if is_first() else ():
        worst = percent(metrics[name])
        say(f"failed: --max-{name} {percent(most)} (the worst layer has {worst})")
    if exceeded:
        raise typer.Exit(CONDITION_HELD)
