"""Results as pages, tables and figures: draws the records that it is given and computes nothing.

    page        a self-contained HTML page
    figures     matplotlib figures by name, each drawn when called; the first is the main one
    terminal    a Rich renderable
    summary     a few plain lines
    notebook    a piece of HTML with table and figures, without script

`MODULES` says which module draws a result, by the name of its format; each defines these five.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tieline.core.errors import ParameterError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

__all__ = ["MODULES", "figures", "notebook", "page", "summary", "terminal"]

MODULES = {
    "tieline-inspection": "tieline.report.inspection",
    "tieline-diff": "tieline.report.diff",
    "tieline-audit": "tieline.report.audit",
    "tieline-smooth": "tieline.report.smooth",
    "tieline-attention": "tieline.lab.report.attention",
    "tieline-reroute": "tieline.lab.report.reroute",
    "tieline-upcycling": "tieline.report.made",
    "tieline-merge": "tieline.report.made",
    "tieline-conversion": "tieline.report.made",
    "tieline-capture": "tieline.report.made",
    "tieline-engines": "tieline.report.listings",
    "tieline-check": "tieline.report.check",
    "tieline-design": "tieline.lab.report.design",
    "tieline-rates": "tieline.lab.report.rates",
    "tieline-ledger": "tieline.lab.report.ledger",
    "tieline-claims": "tieline.report.listings",
    "tieline-training": "tieline.lab.report.training",
    "tieline-training-plan": "tieline.report.listings",
    "tieline-recipes": "tieline.report.listings",
}


def page(result: Any) -> str:
    """The self-contained HTML page of a result."""
    return _module(result).page(result)


def figures(result: Any) -> "dict[str, Callable[[], Figure]]":
    """The matplotlib figures of a result by name, each drawn when called; the main one first."""
    return _module(result).figures(result)


def terminal(result: Any, width: int) -> "RenderableType":
    """A result for a terminal of so many characters."""
    return _module(result).terminal(result, width)


def summary(result: Any) -> str:
    """A result in a few plain lines."""
    return _module(result).summary(result)


def notebook(result: Any) -> str:
    """A result as a piece of HTML with table and figures, without script."""
    return _module(result).notebook(result)


def _module(result: Any) -> Any:
    name = MODULES.get(result.format)
    if name is None:
        raise ParameterError(f"no report draws {result.format!r}, only {', '.join(MODULES)}")
    return importlib.import_module(name)
