"""Conditions that make a command exit with 1, for continuous integration.

`inspect --fail-if CONDITION` compares a named number of the result:

    condition  =  metric comparison number
    metric     =  name [ "@" level ] [ ":" which ]      flip@bf16, kl@model bf16, gap@0.5, dead
    comparison =  ">" | ">=" | "<" | "<="
    number     =  a decimal number, 0.02 or 2e-2 or 2%

Nothing is evaluated as code. `diff --max-flip` and `--max-unexplained` limit what every layer may
have.
"""

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from tieline.cli.terminal_session import CONDITION_HELD, print_to_stderr
from tieline.cli.torchrun import is_main_process
from tieline.core.errors import require
from tieline.core.setting_fields import SettingError, Settings, read_share, setting

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
        """Return whether the condition holds for this value of its metric."""
        return COMPARISONS[self.comparison](value, self.number)


def parse_condition(text: str) -> MetricCondition:
    """Parse a condition such as `flip@bf16 > 0.02`."""
    match = _CONDITION.fullmatch(text)
    require(
        match is not None,
        f"cannot read the condition {text!r}: write METRIC > NUMBER (or >=, <, <=), such as "
        "flip@bf16>0.02",
    )
    assert match is not None
    metric, comparison, number, sign = match.groups()
    return MetricCondition(text.strip(), metric, comparison, float(number) / (100 if sign else 1))


def check_metric_names(conditions: Collection[MetricCondition], metrics: Collection[str]) -> None:
    """Raise for a condition on an unknown metric; the message lists the known ones."""
    for condition in conditions:
        require(
            condition.metric in metrics,
            f"{condition.text!r}: no metric {condition.metric!r} here; known: "
            f"{', '.join(sorted(metrics))}",
        )


def fulfilled_conditions(
    conditions: Collection[MetricCondition], metrics: Mapping[str, float]
) -> list[tuple[MetricCondition, float]]:
    """Return the conditions that hold for these metrics, each with the metric's value."""
    check_metric_names(conditions, metrics)
    values = [(condition, metrics[condition.metric]) for condition in conditions]
    return [(condition, value) for condition, value in values if condition.holds(value)]


def possible_conditions(conditions: list[MetricCondition], result: Any) -> list[MetricCondition]:
    """Return the conditions that can hold: without ties (k = E) only those on existing metrics."""
    layers = getattr(getattr(result, "measures", None), "layers", ())
    if not layers or any(layer.k < layer.n_experts for layer in layers):
        return conditions
    return [condition for condition in conditions if condition.metric in result.metrics]


def exit_on_conditions(fulfilled: list[tuple[MetricCondition, float]]) -> None:
    """Print the fulfilled conditions and exit with 1, if there are any."""
    from tieline.report.words.numbers import significant

    for condition, value in fulfilled if is_main_process() else ():
        print_to_stderr(f"failed: {condition.text} ({condition.metric} is {significant(value, 4)})")
    if fulfilled:
        raise typer.Exit(CONDITION_HELD)


class DiffLimits(Settings):
    """Shares that make the command exit with 1 if any layer exceeds them."""

    max_flip: float | None = setting(
        None,
        read=read_share,
        help="Exit with 1 if any layer's flip rate exceeds this: 0.01 or 1%.",
    )
    max_unexplained: float | None = setting(
        None,
        read=read_share,
        help="Exit with 1 if more of any layer's tokens flip beyond their noise.",
    )


def check_attributable(limits: DiffLimits, result: Any) -> None:
    """Raise if unexplained flips are limited but cannot be attributed."""
    if limits.max_unexplained is not None and "unexplained" not in result.metrics:
        from tieline.core.text import layer_label

        layer = next(layer for layer in result.layers if layer.attribution is None)
        raise SettingError(
            "{max_unexplained}: {layer} is {status}",
            layer=layer_label(layer.name),
            status=layer.attribution_status,
        )


def exit_on_exceeded_limits(limits: DiffLimits, metrics: dict[str, float]) -> None:
    """Print the exceeded limits and exit with 1, if there are any."""
    from tieline.report.words.numbers import percent

    shares = {"flip": limits.max_flip, "unexplained": limits.max_unexplained}
    exceeded = {n: share for n, share in shares.items() if share is not None and metrics[n] > share}
    for name, share in exceeded.items() if is_main_process() else ():
        worst = percent(metrics[name])
        print_to_stderr(f"failed: --max-{name} {percent(share)} (the worst layer has {worst})")
    if exceeded:
        raise typer.Exit(CONDITION_HELD)
