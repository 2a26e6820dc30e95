"""Results of the laboratory that are one table: claims, recipes, the plan of a training run."""

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from tieline.lab.report.training import indented, pairs
from tieline.report.listings import Listing, Listings
from tieline.report.tables import Grid, text_table
from tieline.report.words.numbers import duration, significant

if TYPE_CHECKING:
    from tieline.lab.claims.ledger import Catalogue
    from tieline.lab.training.engine import TrainingPlan
    from tieline.lab.training.recipes import RecipeList


def _list_catalogue(result: "Catalogue") -> Listing:
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
    return Listing("reproduction", "Catalogue of claims", facts, Grid(head, tuple(rows)), shown)


def _list_recipes(result: "RecipeList") -> Listing:
    rows = [(name, words.partition("\n")[0]) for name, words in result.recipes.items()]
    table = text_table(("recipe", "what it trains"), rows, 2, fold=True)
    table.columns[0].no_wrap = True
    grid = Grid(("recipe", "what it trains"), tuple(rows))
    return Listing("training", "Recipes", f"{len(rows)} recipes", grid, table)


def _list_plan(result: "TrainingPlan") -> Listing:
    time = "unknown without data"
    if result.seconds is not None:
        step = significant(result.step_seconds)
        time = f"about {duration(result.seconds)} here ({step} s a step)"
    facts = [("parameters", f"{result.parameters:,}"), ("data", result.data), ("time", time)]
    lines = [*indented(result.config), "", *(f"{name:10}  {value}" for name, value in facts)]
    settings = pairs("setting", result.config)
    table = Grid(settings.head, (*facts, *settings.rows))
    words = f"{result.parameters:,} parameters, {time}"
    return Listing("training", "Training plan", words, table, Text("\n".join(lines)))


_VIEWS = Listings(
    {
        "tieline-claims": _list_catalogue,
        "tieline-recipes": _list_recipes,
        "tieline-training-plan": _list_plan,
    }
)
page, figures, terminal = _VIEWS.page, _VIEWS.figures, _VIEWS.terminal
summary, notebook = _VIEWS.summary, _VIEWS.notebook
