"""tieline capture [MODEL] --engine ENGINE -o TRACE: what an inference engine routes."""

from pathlib import Path
from typing import Annotated

import typer

from tieline.cli.app import app, guarded
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Html, Json, ModelName, Overwrite
from tieline.cli.ranks import joined_processes
from tieline.core.errors import require
from tieline.run.shared_settings import CaptureSettings


@app.command()
@guarded
def capture(
    *,
    model: ModelName = "demo",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the trace.", metavar="TRACE")
    ] = None,
    settings: CaptureSettings,
    list_engines: Annotated[
        bool, typer.Option("--list-engines", help="Show what is found where, and how to install.")
    ] = False,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Run a model in an inference engine and save what its routers choose as a trace."""
    trace = None if list_engines else out
    outputs = Outputs(html, json_to, trace=trace, overwrite=overwrite)
    outputs.check(model, settings.text, settings.ids, settings.tokens_from)
    require(list_engines or out is not None, "name the folder of the trace with -o")
    with progress_bars() as progress, joined_processes(settings.parallel, "capturing") as parallel:
        from tieline.engines.engine_capture import capture_engine
        from tieline.engines.registry import list_engines as all_engines
        from tieline.models.checkpoint import quiet_transformers

        quiet_transformers()
        if list_engines:
            result = all_engines()
        else:
            result = capture_engine(
                model, output=out, settings=settings, parallel=parallel, progress=progress
            )
    deliver(result, outputs)
