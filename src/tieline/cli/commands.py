"""The commands of the instrument: each checks its outputs, runs one job and writes its result.

inspect, audit, smooth    on a model; inspect also shows saved runs
diff                      on two models or runs
check, convert, merge     on files of routes
serve-check               on a running server
capture                   on a model in an inference engine
"""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tieline.analysis.job_settings import (
    AuditSettings,
    CheckSettings,
    ConvertSettings,
    DiffSettings,
    InspectSettings,
    MergeSettings,
    ServeCheckSettings,
    SmoothSettings,
)
from tieline.cli.app import app, guarded, run_job
from tieline.cli.conditions import (
    DiffLimits,
    MetricCondition,
    check_attributable,
    check_metric_names,
    exit_on_conditions,
    exit_on_exceeded_limits,
    fulfilled_conditions,
    parse_condition,
    possible_conditions,
)
from tieline.cli.options import Html, Json, ModelName, Overwrite
from tieline.cli.outputs import Outputs, deliver
from tieline.cli.progress import progress_bars
from tieline.cli.terminal_session import CONDITION_HELD, uncollected_imports
from tieline.cli.torchrun import joined_processes
from tieline.core.errors import require
from tieline.core.files import check_folder
from tieline.core.setting_fields import require_setting
from tieline.core.untrusted_input import admit_source
from tieline.run.shared_settings import CaptureSettings

SIDE = (
    "Folder of a trace, file of an engine (.npy, .npz, .safetensors, .csv, .jsonl), model, or "
    "model in an engine: vllm:MODEL, mlx:MODEL, llama.cpp:FILE.gguf."
)


@app.command()
@guarded
def inspect(
    *,
    source: Annotated[
        str,
        typer.Argument(
            help="Folder or hub id of a model, by default the one in the box; or a saved trace, "
            "summary or RESULT.json of any command.",
            metavar="MODEL|TRACE|RESULT.json",
            show_default=False,
        ),
    ] = "demo",
    settings: InspectSettings,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit with 1 if this holds, 'flip@bf16>0.02'; can be repeated."),
    ] = None,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
    figure: Annotated[
        Path | None, typer.Option(help="Write a figure for papers: .pdf, .png or .svg.")
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Save the routing itself in a new folder.")
    ] = None,
) -> None:
    """Measure how near a model's tokens are to a routing tie, and what a flip costs.

    A saved trace or summary is measured without its model; a saved result is shown again.
    """
    conditions = [parse_condition(text) for text in fail_if or []]
    outputs = Outputs(html, json_to, figure, save_trace, overwrite=overwrite)
    outputs.check_targets(source, settings.text)
    result = _inspect_or_load(source, settings, conditions, save_trace)
    fulfilled = fulfilled_conditions(possible_conditions(conditions, result), result.metrics)
    deliver(result, outputs, "add --html report.html for the page with charts")
    exit_on_conditions(fulfilled)


def _inspect_or_load(
    source: str,
    settings: InspectSettings,
    conditions: list[MetricCondition],
    save_trace: Path | None,
) -> Any:
    """Inspect a model, a trace or a summary, or load a saved result."""
    admit_source(source, settings.trust_remote_code)
    with progress_bars() as progress, joined_processes(settings.parallel, "inspecting") as parallel:
        with uncollected_imports():
            from tieline.analysis.inspect import inspect as run
            from tieline.analysis.inspect_observations import inspection_metric_names
            from tieline.analysis.route_files import load, source_kind
            from tieline.models.saved_models import quiet_transformers

        quiet_transformers()
        kind = source_kind(source)
        saved = load(source) if kind == "result" else None
        if kind != "model":
            _refuse_options_of_saved(source, settings, save_trace, saved)
        if saved is not None:
            return saved
        names = inspection_metric_names(settings.loss_jumps, serve=settings.serve or "bf16")
        check_metric_names(conditions, names)
        return run(source, settings=settings, parallel=parallel, progress=progress)


def _refuse_options_of_saved(
    source: str, settings: InspectSettings, save_trace: Path | None, saved: Any
) -> None:
    """Raise if options of models are given for a saved run.

    `expert_tokens` also applies to traces and summaries, and no option to a saved result.
    """
    changed = settings.changed()
    if saved is None:
        changed.pop("expert_tokens", None)
    model = getattr(saved, "model", getattr(saved, "provenance", {}).get("model"))
    options = [f"{{{name}}}" for name in changed]
    repeated = [
        f"{{{name}}}" if isinstance(value, bool) else f"{{{name}}} ..."
        for name, value in changed.items()
    ]
    require_setting(
        not changed,
        f"{', '.join(options)} is for models, and {{source}} is saved: "
        f"run tieline inspect {{model}} {' '.join(repeated)}",
        source=source,
        model=shlex.quote(model) if isinstance(model, str) else "MODEL",
    )
    require(save_trace is None, f"--save-trace: {source} is saved already")


@app.command()
@guarded
def diff(
    *,
    a: Annotated[str, typer.Argument(help=f"{SIDE} 'demo' is the one in the box.", metavar="A")],
    b: Annotated[str, typer.Argument(help="The same for the other side.", metavar="B")],
    settings: DiffSettings,
    limits: DiffLimits,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare the experts that two runs choose, and tell whether ties explain differences."""
    outputs = Outputs(html, json_to, overwrite=overwrite)
    outputs.check_targets(a, b, settings.text)
    result = run_job("tieline.analysis.diff:diff", a, b, settings=settings, activity="comparing")
    check_attributable(limits, result)
    deliver(result, outputs, "add --html diff.html for the page with charts")
    exit_on_exceeded_limits(limits, result.metrics)


@app.command()
@guarded
def audit(
    *,
    model: ModelName = "demo",
    settings: AuditSettings,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure what low precision and noise do to a model's routing, and what to keep in float32."""
    outputs = Outputs(html, json_to, overwrite=overwrite)
    outputs.check_targets(model, settings.text)
    result = run_job("tieline.analysis.audit:audit", model, settings=settings, activity="auditing")
    deliver(result, outputs, "add --html audit.html for the page with charts")


@app.command()
@guarded
def smooth(
    *,
    model: ModelName = "demo",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder for the smoothed model.")
    ] = None,
    settings: SmoothSettings,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Make routing continuous at ties instead of top-k, and measure what that repairs and costs."""
    outputs = Outputs(html, json_to, model=out, overwrite=overwrite)
    outputs.check_targets(model, settings.text)
    result = run_job(
        "tieline.analysis.smooth:smooth", model, settings=settings, activity="smoothing"
    )
    deliver(result, outputs, "add -o FOLDER to save the smoothed model")


@app.command()
@guarded
def check(
    *,
    routes: Annotated[
        list[str],
        typer.Argument(help="Files of routes, or folders of traces.", metavar="ROUTES ..."),
    ],
    settings: CheckSettings,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Check whether files of routes are sound; exit with 1 if one is not."""
    outputs = Outputs(html, json_to, overwrite=overwrite, page_package="jinja2")
    outputs.check_targets(*routes, settings.tokens, settings.against, settings.model)
    for source in (*routes, settings.model):
        admit_source(source)
    with progress_bars(first_stage="reading the routes"):
        with uncollected_imports():
            from tieline.analysis.check import check as run
            from tieline.models.saved_models import quiet_transformers

        quiet_transformers()
        result = run(routes, settings=settings)
    deliver(result, outputs)
    if not result.sound:
        raise typer.Exit(CONDITION_HELD)


@app.command("serve-check")
@guarded
def serve_check(
    *,
    url: Annotated[str, typer.Argument(help="Address of a server, http://HOST:PORT.")],
    settings: ServeCheckSettings,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Tell whether a server's choices depend on the batch; exit with 1 if they do."""
    outputs = Outputs(html, json_to, overwrite=overwrite, page_package="jinja2")
    outputs.check_targets(settings.text, settings.prompts, settings.model)
    result = run_job("tieline.analysis.serve_check:serve_check", url, settings=settings)
    deliver(result, outputs, "add --html serve.html for the page")
    if not result.invariant:
        raise typer.Exit(CONDITION_HELD)


@app.command()
@guarded
def convert(
    *,
    source: Annotated[str, typer.Argument(help="Routes in any form, or a trace.", metavar="IN")],
    output: Annotated[Path, typer.Argument(help="The file or folder to make.", metavar="OUT")],
    settings: ConvertSettings,
    json_to: Json = None,
) -> None:
    """Read routes of any producer and write them in the form of another."""
    outputs = Outputs(json=json_to, extended=output, overwrite=settings.overwrite)
    outputs.check_targets(source, settings.tokens)
    admit_source(source)
    with progress_bars(first_stage="reading the routes"):
        with uncollected_imports():
            from tieline.analysis.route_files import convert as run

        result = run(source, output, settings=settings)
    deliver(result, outputs)


@app.command()
@guarded
def merge(
    *,
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of traces, or of streaming summaries.", metavar="A B ..."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the result.")],
    settings: MergeSettings,
    json_to: Json = None,
) -> None:
    """Merge the pieces of a run exactly: traces token by token, summaries by counts."""
    outputs = Outputs(json=json_to, extended=out, overwrite=settings.overwrite)
    outputs.check_targets(*folders)
    check_folder(out)
    with progress_bars(first_stage="reading the folders"):
        with uncollected_imports():
            from tieline.analysis.route_files import merge as run

        result = run(folders, out, settings=settings)
    deliver(result, outputs)


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
    outputs.check_targets(model, settings.text, settings.ids, settings.tokens_from)
    require(list_engines or out is not None, "name the folder of the trace with -o")
    admit_source(model)
    with progress_bars() as progress, joined_processes(settings.parallel, "capturing") as parallel:
        with uncollected_imports():
            from tieline.engines.engine_capture import capture_engine
            from tieline.engines.engine_registry import list_engines as all_engines
            from tieline.models.saved_models import quiet_transformers

        quiet_transformers()
        if list_engines:
            result = all_engines()
        else:
            result = capture_engine(
                model, output=out, settings=settings, parallel=parallel, progress=progress
            )
    deliver(result, outputs)
