"""What a training run would do, and what it came to, as lines of text."""

from collections.abc import Iterator, Mapping
from typing import Any

from tieline.report.numbers import significant

__all__ = ["plan_lines", "recipe_lines", "result_lines"]

MINUTE, HOUR = 60, 3600


def recipe_lines(recipes: Mapping[str, str]) -> list[str]:
    """One recipe a line, with the first sentence that its function says about itself."""
    width = max(len(name) for name in recipes)
    return [f"{name:{width}}  {told.splitlines()[0]}" for name, told in recipes.items()]


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Configuration, size, data and time."""
    time = "unknown without data"
    if plan["seconds"] is not None:
        step = significant(plan["step_seconds"])
        time = f"about {duration(plan['seconds'])} here ({step} s a step)"
    return [
        *_fields(plan["config"], ""),
        "",
        f"parameters  {plan['parameters']:,}",
        f"data        {plan['data']}",
        f"time        {time}",
    ]


def result_lines(result: Mapping[str, Any]) -> list[str]:
    """Size, time and scores."""
    config = result["config"]
    steps = config["optim"]["steps"]
    return [
        f"{config['recipe']}, seed {config['seed']}: {result['parameters']:,} parameters, "
        f"{steps} steps in {duration(result['seconds'])}",
        f"data  {result['data']}",
        *_fields(result["scores"], ""),
        f"in    {result['folder']}",
    ]


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds < 2 * MINUTE:
        return f"{significant(seconds)} s"
    if seconds < 2 * HOUR:
        return f"{significant(seconds / MINUTE)} min"
    return f"{significant(seconds / HOUR)} h"


def _fields(record: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Nested fields, a level of indent each; what is empty is left out."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}"
            yield from _fields(value, indent + "  ")
        elif value not in (None, "", []):
            yield f"{indent}{name}  {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return significant(value, 5)
    if isinstance(value, list):
        return ", ".join(_text(one) for one in value)
    return str(value)
