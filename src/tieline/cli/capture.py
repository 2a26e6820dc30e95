"""tieline capture [MODEL] --engine ENGINE -o TRACE: what an inference engine routes."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import (
    Debug,
    Html,
    Json,
    Keep,
    Memory,
    ModelName,
    Overwrite,
    Seed,
    Stream,
    TextFile,
    app,
    guarded,
    memory_size,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.ranks import Parallel, joined
from tieline.core.errors import require


@app.command()
@guarded
def capture(
    model: ModelName = "demo",
    engine: Annotated[
        str, typer.Option("--engine", help="transformers, vllm, mlx or llama.cpp.")
    ] = "transformers",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the trace.", metavar="TRACE")
    ] = None,
    text: TextFile = None,
    ids: Annotated[
        Path | None, typer.Option(help="Token ids to run: .npy, .npz, .safetensors or JSON.")
    ] = None,
    tokens_from: Annotated[
        Path | None, typer.Option(help="Run the tokens of this trace or file of routes.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer cuts the text, for a GGUF.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text.", min=1)] = 4096,
    sequence_length: Annotated[int, typer.Option(help="Tokens per document.", min=2)] = 256,
    dtype: Annotated[
        str, typer.Option(help="fp32 (which auto means here), bf16 or fp16, where it can choose.")
    ] = "auto",
    engine_python: Annotated[
        Path | None, typer.Option(help="Python that the engine is installed in.")
    ] = None,
    engine_defaults: Annotated[
        bool,
        typer.Option("--engine-defaults", help="All settings as the engine has them by default."),
    ] = False,
    no_scores: Annotated[
        bool, typer.Option("--no-scores", help="Keep the choice alone, without scores.")
    ] = False,
    list_engines: Annotated[
        bool, typer.Option("--list-engines", help="Show what is found where, and how to install.")
    ] = False,
    html: Html = None,
    json_to: Json = None,
    stream: Stream = None,
    memory: Memory = None,
    keep: Keep = True,
    overwrite: Overwrite = False,
    seed: Seed = 0,
    parallel: Parallel = None,
    debug: Debug = False,
) -> None:
    """Run a model in an inference engine and save what its routers choose as a trace.

    Nothing is drawn at random: --seed is accepted, as by every command, and changes nothing.
    """
    outputs = Outputs(html, json_to, trace=out, overwrite=overwrite)
    outputs.check(model, text, ids, tokens_from)
    require(list_engines or out is not None, "name the folder of the trace with -o")
    with progress_bars() as progress, joined(parallel, "capturing") as way:
        from tieline.analysis.engine_runs import capture_engine
        from tieline.analysis.sources import quiet_transformers
        from tieline.engines.registry import list_engines as all_engines

        quiet_transformers()
        if list_engines:
            result = all_engines()
            outputs = Outputs(html, json_to, overwrite=overwrite)
        else:
            result = capture_engine(
                model,
                engine=engine,
                text=text,
                ids=ids,
                tokens_from=tokens_from,
                tokenizer=tokenizer,
                tokens=tokens,
                sequence_length=sequence_length,
                engine_python=engine_python,
                engine_defaults=engine_defaults,
                dtype=dtype,
                scores=not no_scores,
                output=out,
                stream=stream,
                memory=memory_size(memory),
                keep=keep,
                parallel=way,
                progress=progress,
            )
    deliver(result, outputs)
