"""tieline inspect [MODEL]: how near a model's tokens are to a routing tie.

Conditions on the named numbers of the result make a run fail, for continuous integration:

    condition  =  metric comparison number
    metric     =  name [ "@" level ] [ ":" which ]      flip@bf16, flip@0.01:any, gap@0.5, dead
    comparison =  ">" | ">=" | "<" | "<="
    number     =  a decimal number, 0.02 or 2e-2 or 2%

Nothing is evaluated as code.
"""

import operator
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from inspect import signature
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
    Keep,
    Memory,
    Overwrite,
    Resume,
    Revision,
    Seed,
    Stream,
    TextFile,
    TrustRemoteCode,
    app,
    guarded,
    layer_choice,
    memory_size,
    say,
)
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.ranks import Parallel, is_first, joined
from tieline.core.errors import require

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_METRIC = r"[a-z][a-z_]*(?:@[A-Za-z0-9_.+-]+)?(?::[a-z]+)?"
_CONDITION = re.compile(rf"\s*({_METRIC})\s*(>=|<=|>|<)\s*({_NUMBER})\s*(%?)\s*", re.ASCII)


@dataclass(frozen=True)
class Condition:
    """A metric compared with a number; `text` is how the user wrote it."""

    text: str
    metric: str
    comparison: str
    number: float

    def holds(self, value: float) -> bool:
        """Whether the condition is true of this value of its metric."""
        return COMPARISONS[self.comparison](value, self.number)


@app.command()
@guarded
def inspect(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder or hub id of a model, by default the one in the box; or a saved trace, "
            "summary or RESULT.json of any command.",
            metavar="MODEL|TRACE|RESULT.json",
            show_default=False,
        ),
    ] = "demo",
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text.", min=1)] = 16384,
    batch_size: BatchSize = 8,
    dtype: Annotated[
        str, typer.Option(help="Precision the model runs in: auto, fp32, bf16 or fp16.")
    ] = "auto",
    device: Device = "cpu",
    layers: Annotated[
        str | None, typer.Option(help="Routed layers, such as 0,2,5-7, or names of routers.")
    ] = None,
    revision: Revision = None,
    seed: Seed = 0,
    html: Html = None,
    json_to: Json = None,
    overwrite: Overwrite = False,
    figure: Annotated[
        Path | None, typer.Option(help="Write a figure for papers: .pdf, .png or .svg.")
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Save the routing itself in a new folder.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit with 1 if this holds, 'flip@bf16>0.02'; can be repeated."),
    ] = None,
    loss_jumps: Annotated[
        bool, typer.Option("--loss-jumps", help="Also measure what flips do to the loss.")
    ] = False,
    stream: Stream = None,
    memory: Memory = None,
    keep: Keep = True,
    expert_tokens: Annotated[
        int,
        typer.Option(help="Tokens that calibration shall give each expert.", min=1),
    ] = 128,
    resume: Resume = False,
    trust_remote_code: TrustRemoteCode = False,
    parallel: Parallel = None,
    debug: Debug = False,
) -> None:
    """Measure how near a model's tokens are to a routing tie, and what a flip costs.

    A saved trace or summary is measured without its model; a saved result is shown again.
    """
    conditions = [parse_condition(words) for words in fail_if or []]
    outputs = Outputs(html, json_to, figure, save_trace, overwrite=overwrite)
    outputs.check(source, text)
    options = {
        "text": text,
        "tokens": tokens,
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
        "layers": layer_choice(layers),
        "revision": revision,
        "seed": seed,
        "loss_jumps": loss_jumps,
        "trust_remote_code": trust_remote_code,
    }
    options |= {"stream": stream, "memory": memory_size(memory), "keep": keep, "resume": resume}
    options |= {"parallel": parallel, "expert_tokens": expert_tokens}
    _finish(_inspected(source, options, conditions, save_trace), conditions, outputs)


def _inspected(
    source: str, options: dict[str, Any], conditions: list[Condition], save_trace: Path | None
) -> Any:
    """The inspection of a model, a trace or a summary, or a saved result."""
    parallel = options.pop("parallel")
    with progress_bars() as progress, joined(parallel, "inspecting") as way:
        from tieline.analysis.findings import metric_names
        from tieline.analysis.inspect import inspect as run
        from tieline.analysis.sources import load, quiet_transformers, source_kind

        quiet_transformers()
        options |= {"parallel": way}
        kind = source_kind(source)
        saved = load(source) if kind == "result" else None
        if kind != "model":
            _check_saved(source, options, run, save_trace, saved)
        if saved is not None:
            return saved
        check_names(conditions, metric_names(options["loss_jumps"]))
        return run(source, **options, progress=progress)


def _finish(result: Any, conditions: list[Condition], outputs: Outputs) -> None:
    """Deliver a result, and leave with 1 if a condition holds."""
    found = held(conditions, result.metrics)
    deliver(result, outputs, "add --html report.html for the page with charts")
    _judge(found)


def _check_saved(
    source: str,
    options: Mapping[str, Any],
    run: Callable[..., Any],
    save_trace: Path | None,
    saved: Any,
) -> None:
    """Refuse options of models, where they are not the defaults of `run`, for a saved run.

    Of a trace or summary `expert_tokens` still counts; a saved result is shown as it is.
    """
    usual = signature(run).parameters
    changed = [name for name, value in options.items() if value != usual[name].default]
    if saved is None:
        changed = [name for name in changed if name != "expert_tokens"]
    given = [f"--{name.replace('_', '-')}" for name in changed]
    needs = f"{', '.join(given)} is for models, and {source} is saved"
    asked = [
        option + ("" if isinstance(options[name], bool) else " ...")
        for name, option in zip(changed, given, strict=True)
    ]
    require(not given, f"{needs}: {_again(saved, *asked)}")
    require(save_trace is None, f"--save-trace: {source} is saved already")


def _again(saved: Any, *options: str) -> str:
    """The command that has the model of a saved result do what was asked."""
    model = getattr(saved, "model", getattr(saved, "provenance", {}).get("model"))
    named = shlex.quote(model) if isinstance(model, str) else "MODEL"
    return f"run tieline inspect {named} {' '.join(options)}"


def _judge(found: list[tuple[Condition, float]]) -> None:
    from tieline.report.words.numbers import significant

    for condition, value in found if is_first() else ():
        say(f"failed: {condition.text} ({condition.metric} is {significant(value, 4)})")
    if found:
        raise typer.Exit(CONDITION_HELD)


def parse_condition(text: str) -> Condition:
    """Read a condition such as `flip@bf16 > 0.02`."""
    match = _CONDITION.fullmatch(text)
    require(
        match is not None,
        f"cannot read the condition {text!r}: write METRIC > NUMBER (or >=, <, <=), such as "
        "flip@bf16>0.02",
    )
    assert match is not None
    metric, comparison, number, sign = match.groups()
    return Condition(text.strip(), metric, comparison, float(number) / (100 if sign else 1))


def check_names(conditions: Collection[Condition], known: Collection[str]) -> None:
    """Refuse conditions on metrics that are not among the known ones, listing these."""
    for condition in conditions:
        require(
            condition.metric in known,
            f"{condition.text!r}: no metric {condition.metric!r} here; known: "
            f"{', '.join(sorted(known))}",
        )


def held(
    conditions: Collection[Condition], metrics: Mapping[str, float]
) -> list[tuple[Condition, float]]:
    """The conditions that are true of these metrics, each with the metric's value."""
    check_names(conditions, metrics)
    values = [(condition, metrics[condition.metric]) for condition in conditions]
    return [(condition, value) for condition, value in values if condition.holds(value)]
