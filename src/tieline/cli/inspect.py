"""tieline inspect [MODEL]: how near a model's tokens are to a routing tie.

Conditions on the named numbers of the result make a run fail, for continuous integration:

    condition  =  metric comparison number
    metric     =  name [ "@" level ] [ ":" which ]      flip@bf16, kl@model bf16, gap@0.5, dead
    comparison =  ">" | ">=" | "<" | "<="
    number     =  a decimal number, 0.02 or 2e-2 or 2%

Nothing is evaluated as code.
"""

import operator
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tieline.analysis.job_settings import InspectSettings
from tieline.cli.app import CONDITION_HELD, app, guarded, say
from tieline.cli.deliver import Outputs, deliver, progress_bars
from tieline.cli.options import Html, Json, Overwrite
from tieline.cli.ranks import is_first, joined_processes
from tieline.core.errors import require
from tieline.core.setting_fields import require_setting

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_METRIC = r"[a-z][a-z_]*(?:@(?:model )?[A-Za-z0-9_.+-]+)?(?::[a-z]+)?"
_CONDITION = re.compile(rf"\s*({_METRIC})\s*(>=|<=|>|<)\s*({_NUMBER})\s*(%?)\s*", re.ASCII)


@dataclass(frozen=True)
class MetricCondition:
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
    outputs.check(source, settings.text)
    result = _inspection_or_saved(source, settings, conditions, save_trace)
    if _has_no_ties(result):
        conditions = [each for each in conditions if each.metric in result.metrics]
    fulfilled = fulfilled_conditions(conditions, result.metrics)
    deliver(result, outputs, "add --html report.html for the page with charts")
    _exit_on_conditions(fulfilled)


def _inspection_or_saved(
    source: str,
    settings: InspectSettings,
    conditions: list[MetricCondition],
    save_trace: Path | None,
) -> Any:
    """The inspection of a model, a trace or a summary, or a saved result."""
    with progress_bars() as progress, joined_processes(settings.parallel, "inspecting") as parallel:
        from tieline.analysis.inspect import inspect as run
        from tieline.analysis.inspection import inspection_metric_names
        from tieline.analysis.route_files import load, source_kind
        from tieline.models.checkpoint import quiet_transformers

        quiet_transformers()
        kind = source_kind(source)
        saved = load(source) if kind == "result" else None
        if kind != "model":
            _check_saved(source, settings, save_trace, saved)
        if saved is not None:
            return saved
        names = inspection_metric_names(settings.loss_jumps, serve=settings.serve or "bf16")
        check_names(conditions, names)
        return run(source, settings=settings, parallel=parallel, progress=progress)


def _has_no_ties(result: Any) -> bool:
    """Whether every expert is chosen: conditions on gaps and flips, which it lacks, cannot hold."""
    layers = getattr(getattr(result, "measures", None), "layers", ())
    return bool(layers) and all(layer.k == layer.n_experts for layer in layers)


def _check_saved(
    source: str, settings: InspectSettings, save_trace: Path | None, saved: Any
) -> None:
    """Refuse options of models for a saved run.

    Of a trace or summary `expert_tokens` still counts; a saved result is shown as it is.
    """
    changed = settings.changed()
    if saved is None:
        changed.pop("expert_tokens", None)
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
        model=_model_of(saved),
    )
    require(save_trace is None, f"--save-trace: {source} is saved already")


def _model_of(saved: Any) -> str:
    """The name of the model that a saved result is about, as one types it."""
    model = getattr(saved, "model", getattr(saved, "provenance", {}).get("model"))
    return shlex.quote(model) if isinstance(model, str) else "MODEL"


def _exit_on_conditions(fulfilled: list[tuple[MetricCondition, float]]) -> None:
    """Exit with 1 if a condition is fulfilled."""
    from tieline.report.words.numbers import significant

    for condition, value in fulfilled if is_first() else ():
        say(f"failed: {condition.text} ({condition.metric} is {significant(value, 4)})")
    if fulfilled:
        raise typer.Exit(CONDITION_HELD)


def parse_condition(text: str) -> MetricCondition:
    """Read a condition such as `flip@bf16 > 0.02`."""
    match = _CONDITION.fullmatch(text)
    require(
        match is not None,
        f"cannot read the condition {text!r}: write METRIC > NUMBER (or >=, <, <=), such as "
        "flip@bf16>0.02",
    )
    assert match is not None
    metric, comparison, number, sign = match.groups()
    return MetricCondition(text.strip(), metric, comparison, float(number) / (100 if sign else 1))


def check_names(conditions: Collection[MetricCondition], metrics: Collection[str]) -> None:
    """Refuse conditions on metrics that are not among the known ones, listing these."""
    for condition in conditions:
        require(
            condition.metric in metrics,
            f"{condition.text!r}: no metric {condition.metric!r} here; known: "
            f"{', '.join(sorted(metrics))}",
        )


def fulfilled_conditions(
    conditions: Collection[MetricCondition], metrics: Mapping[str, float]
) -> list[tuple[MetricCondition, float]]:
    """The conditions that are true of these metrics, each with the metric's value."""
    check_names(conditions, metrics)
    values = [(condition, metrics[condition.metric]) for condition in conditions]
    return [(condition, value) for condition, value in values if condition.holds(value)]
