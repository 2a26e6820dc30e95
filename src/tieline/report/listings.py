"""Results that are one table: the claims of the ledger, the recipes, the plan of a training run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from tieline.report.frame import notebook_html
from tieline.report.ledger import SIGNS, STYLES
from tieline.report.plain import Section, plain_page
from tieline.report.tables import Grid, duration, significant, text_table
from tieline.report.training import indented, pairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tieline.papers.ledger import Catalogue
    from tieline.training.engine import TrainingPlan
    from tieline.training.recipes import RecipeList


Listed = Any
"""A `Catalogue`, `RecipeList` or `TrainingPlan`."""


@dataclass(frozen=True)
class _Listing:
    """What all views of a listing show; `view` is that for a terminal."""

    kind: str
    title: str
    facts: str
    table: Grid
    view: RenderableType


def page(result: Listed) -> str:
    """The page: the table."""
    made = _listing(result)
    return plain_page(made.kind, made.title, made.facts, [Section("", made.table, prose=True)])


def figures(result: Listed) -> "dict[str, Callable[[], Figure]]":
    """None: a listing has no figures."""
    return {}


def terminal(result: Listed, width: int) -> RenderableType:
    """The table for a terminal."""
    return _listing(result).view


def summary(result: Listed) -> str:
    """Title and facts."""
    made = _listing(result)
    return f"{made.title}: {made.facts}"


def notebook(result: Listed) -> str:
    """The table."""
    made = _listing(result)
    return notebook_html(made.title, made.facts, "", made.table, {})


def _listing(result: Listed) -> _Listing:
    return MAKERS[result.format](result)


def _list_catalogue(result: "Catalogue") -> _Listing:
    head = ("claim", "number", "what", "expected")
    rows = [(c.id, c.number, c.title, f"{SIGNS[c.expected]} {c.expected}") for c in result.claims]
    table = text_table(head, (), len(head), fold=True)
    table.columns[0].no_wrap = True
    for claim, cells in zip(result.claims, rows, strict=True):
        table.add_row(*map(Text, cells[:-1]), Text(cells[-1], style=STYLES[claim.expected]))
    facts = f"{len(result.claims)} claims of {len(result.papers)} papers"
    return _Listing("reproduction", "Catalogue of claims", facts, Grid(head, tuple(rows)), table)


def _list_recipes(result: "RecipeList") -> _Listing:
    rows = [(name, words.partition("\n")[0]) for name, words in result.recipes.items()]
    table = text_table(("recipe", "what it trains"), rows, 2, fold=True)
    table.columns[0].no_wrap = True
    grid = Grid(("recipe", "what it trains"), tuple(rows))
    return _Listing("training", "Recipes", f"{len(rows)} recipes", grid, table)


def _list_plan(result: "TrainingPlan") -> _Listing:
    time = "unknown without data"
    if result.seconds is not None:
        step = significant(result.step_seconds)
        time = f"about {duration(result.seconds)} here ({step} s a step)"
    facts = [("parameters", f"{result.parameters:,}"), ("data", result.data), ("time", time)]
    lines = [*indented(result.config), "", *(f"{name:10}  {value}" for name, value in facts)]
    settings = pairs("setting", result.config)
    table = Grid(settings.head, (*facts, *settings.rows))
    words = f"{result.parameters:,} parameters, {time}"
    return _Listing("training", "Training plan", words, table, Text("\n".join(lines)))


MAKERS: dict[str, Callable[[Listed], _Listing]] = {
    "tieline-claims": _list_catalogue,
    "tieline-recipes": _list_recipes,
    "tieline-training-plan": _list_plan,
}
"""By the name of the format."""
