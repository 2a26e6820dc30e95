"""Results that are one table: claims, recipes, engines, the plan of a training run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from tieline.lab.report.training import indented, pairs
from tieline.report.frame import notebook_html
from tieline.report.plain import Section, plain_page
from tieline.report.tables import Grid, text_table
from tieline.report.words.numbers import duration, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tieline.engines.registry import EngineEntry, EngineList
    from tieline.lab.claims.ledger import Catalogue
    from tieline.lab.training.engine import TrainingPlan
    from tieline.lab.training.recipes import RecipeList


Listed = Any
"""A `Catalogue`, `RecipeList`, `EngineList` or `TrainingPlan`."""


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
    # here, because it needs torch, and the other listings do not
    from tieline.lab.report.ledger import FEW, SIGNS, STYLES, claim_text

    head = ("claim", "number", "what", "expected")
    rows = [(c.id, c.number, c.title, f"{SIGNS[c.expected]} {c.expected}") for c in result.claims]
    table = text_table(head, (), len(head), fold=True)
    table.columns[0].no_wrap = True
    for claim, cells in zip(result.claims, rows, strict=True):
        table.add_row(*map(Text, cells[:-1]), Text(cells[-1], style=STYLES[claim.expected]))
    told = [claim_text(claim) for claim in result.claims] if len(result.claims) <= FEW else []
    facts = f"{len(result.claims)} claims of {len(result.papers)} papers"
    shown = Group(table, *told)
    return _Listing("reproduction", "Catalogue of claims", facts, Grid(head, tuple(rows)), shown)


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


def _list_engines(result: "EngineList") -> _Listing:
    head = ("engine", "takes", "found in", "versions")
    rows = [
        (
            one.name,
            one.takes,
            one.python or "not found",
            ", ".join(f"{name} {value}" for name, value in one.versions.items()),
        )
        for one in result.engines
    ]
    table = text_table(head, rows, len(head), fold=True)
    table.columns[0].no_wrap = True
    steps = [line for one in result.engines if one.folder for line in _install(one)]
    found = sum(bool(one.python) for one in result.engines)
    facts = f"{found} of {len(rows)} found"
    shown = Group(table, Text("\n".join(steps), no_wrap=True, overflow="ignore"))
    whole = tuple(
        (*row, "; ".join(one.install)) for row, one in zip(rows, result.engines, strict=True)
    )
    grid = Grid((*head, "to install"), whole)
    return _Listing("engines", "Inference engines", facts, grid, shown)


def _install(one: "EngineEntry") -> list[str]:
    """The commands that install an engine, for a shell."""
    return ["", f"# {one.name}, {one.size}", f"VENV={one.folder}", *one.install]


MAKERS: dict[str, Callable[[Listed], _Listing]] = {
    "tieline-claims": _list_catalogue,
    "tieline-recipes": _list_recipes,
    "tieline-engines": _list_engines,
    "tieline-training-plan": _list_plan,
}
"""By the name of the format."""
