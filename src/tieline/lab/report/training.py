"""Reports of a training run, of its plan and of the list of recipes.

PLAN       views of the plan of a run
RECIPES    views of the list of recipes; those of a run are names of the module
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from tieline.report.charts import Axis, Chart, Series
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Listing, Report, Section, listing_views, report_views
from tieline.report.tables import Grid, dotted_rows, text_table
from tieline.report.words.numbers import duration, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tieline.lab.training.recipes import RecipeList
    from tieline.lab.training.training_run import TrainingPlan, TrainingResult


LOSS_CURVES = (
    ("loss", "with the router's losses", "@accent"),
    ("task_loss", "of the task", "@warn"),
)
GAP_CURVES = (
    ("routing/gap_p50", "median", "@accent"),
    ("routing/gap_p10", "10 %", "@notice"),
    ("routing/gap_p1", "1 %", "@warn"),
)
FLIP_CURVES = (
    ("routing/flip_bf16", "flip in bf16", "@warn"),
    ("routing/near_bf16", "within a bf16 step of a tie", "@accent"),
)
"""Logged value, label and colour of each curve."""


STEP_AXIS = Axis("step")
FIGURE_TITLES = {
    "loss": "Training loss",
    "routing": "Gaps and flips of the routing during training",
}


def _training_report(result: "TrainingResult") -> Report:
    """Build the report: scores, curves of losses and routing, configuration."""
    figures = _training_figures(result)
    scores, sections = _field_table("score", result.scores), _score_sections(result.scores)
    curves = [
        Section(FIGURE_TITLES[name], draw=draw, caption=f"{FIGURE_TITLES[name]} against the step")
        for name, draw in figures.items()
    ]
    main, others = sections[:1], sections[1:]
    settings = Section("Configuration", _field_table("setting", result.config), prose=True)
    return Report(
        kind="training",
        title=result.recipe,
        facts=f"{_run_size_text(result)} · {result.data}",
        table=lambda: scores,
        body=lambda: {"sections": [*main, *curves, *others, settings]},
        figures=figures,
    )


def _training_terminal(result: "TrainingResult", width: int) -> RenderableType:
    """Return the terminal view: size, time, data, scores and folder, one per line."""
    head = [f"{result.recipe}, {_run_size_text(result)}", f"data  {result.data}"]
    where = [f"in    {result.folder}"] if result.folder else []
    return Text("\n".join([*head, *_indented_fields(result.scores), *where]))


page, figures, terminal, summary, notebook = report_views(_training_report)._replace(
    terminal=_training_terminal,
    summary=lambda result: f"Training of {result.recipe}, {_training_report(result).facts}",
)


def _indented_fields(record: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield nested fields as lines, each level indented, without empty fields."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}"
            yield from _indented_fields(value, indent + "  ")
        elif not _is_empty_field(value):
            yield f"{indent}{name}  {_field_text(value)}"


def _score_sections(scores: Mapping[str, Any]) -> list[Section]:
    """Return a table of scores by data split, for splits with equal scores, and one of others."""
    groups = {name: value for name, value in scores.items() if isinstance(value, Mapping)}
    splits = [name for name in groups if list(groups[name]) == list(next(iter(groups.values())))]
    others = {name: value for name, value in scores.items() if name not in splits}
    sections = []
    if splits:
        rows = tuple(
            (score, *(_field_text(groups[name][score]) for name in splits))
            for score in groups[splits[0]]
        )
        sections.append(Section("Scores", Grid(("score", *splits), rows)))
    if (table := _field_table("score", others)).rows:
        sections.append(Section("Other scores" if splits else "Scores", table))
    return sections


def _field_table(heading: str, record: Mapping[str, Any]) -> Grid:
    """Return nested fields as a table of dotted names and values, without empty fields."""
    rows = [
        (name, _field_text(value))
        for name, value in dotted_rows(record)
        if not _is_empty_field(value)
    ]
    return Grid((heading, "value"), tuple(rows))


def _run_size_text(result: "TrainingResult") -> str:
    """Return seed, parameters, steps and time of a run as text."""
    return (
        f"seed {result.seed}: {result.parameters:,} parameters, {result.steps} steps in "
        f"{duration(result.seconds)}"
    )


def _is_empty_field(value: Any) -> bool:
    """Return whether a field is None, "" or an empty list."""
    return value is None or value in ("", [], ())


def _field_text(value: Any) -> str:
    """Return a field as text: floats to five digits, lists joined by commas."""
    if isinstance(value, float):
        return significant(value, 5)
    if isinstance(value, list | tuple):
        return ", ".join(map(_field_text, value))
    return str(value)


def _training_figures(result: "TrainingResult") -> "dict[str, Callable[[], Figure]]":
    """Return figures of the loss, and of the routing if it was monitored, by step."""
    losses, gaps, flips = (
        _logged_curves(result, curves) for curves in (LOSS_CURVES, GAP_CURVES, FLIP_CURVES)
    )
    figures: dict[str, Callable[[], Figure]] = {}
    if losses:
        loss = Chart(STEP_AXIS, Axis("loss"), losses)
        figures["loss"] = lambda: chart_figure(loss, width=6.75, height=2.6)
    if gaps or flips:
        quantiles = Chart(STEP_AXIS, Axis("quantile of the gap", "log"), gaps)
        shares = Chart(STEP_AXIS, Axis("share of tokens", percent=True), flips)
        figures["routing"] = lambda: chart_figure(quantiles, shares, width=6.75, height=2.6)
    return figures


def _logged_curves(
    result: "TrainingResult", curves: tuple[tuple[str, str, str], ...]
) -> tuple[Series, ...]:
    """Return the curves whose values were logged."""
    logged = [(result.curve(name), label, colour) for name, label, colour in curves]
    return tuple(
        Series([x for x, _ in points], [y for _, y in points], label, colour, "line+points", size=5)
        for points, label, colour in logged
        if points
    )


def _training_plan_listing(result: "TrainingPlan") -> Listing:
    """Return the plan as a table of facts and settings."""
    settings = _field_table("setting", result.config)
    facts = f"{result.parameters:,} parameters, {_plan_time_text(result)}"
    table = Grid(settings.head, (*_training_plan_facts(result), *settings.rows))
    return Listing("training", "Training plan", facts, table)


def _training_plan_view(result: "TrainingPlan") -> Text:
    """Return the plan in plain lines, for a terminal."""
    facts = (f"{name:10}  {value}" for name, value in _training_plan_facts(result))
    return Text("\n".join([*_indented_fields(result.config), "", *facts]))


def _training_plan_facts(result: "TrainingPlan") -> list[tuple[str, str]]:
    """Return parameters, data and time of a plan."""
    parameters = f"{result.parameters:,}"
    return [("parameters", parameters), ("data", result.data), ("time", _plan_time_text(result))]


def _plan_time_text(result: "TrainingPlan") -> str:
    """Return the estimated time of the run on this machine as text."""
    if result.seconds is None:
        return "unknown without data"
    return f"about {duration(result.seconds)} here ({significant(result.step_seconds)} s a step)"


def _recipes_listing(result: "RecipeList") -> Listing:
    """Return the listing of recipes with the first line of their descriptions."""
    rows = tuple((name, text.partition("\n")[0]) for name, text in result.recipes.items())
    table = Grid(("recipe", "what it trains"), rows)
    return Listing("training", "Recipes", f"{len(rows)} recipes", table)


def _recipes_view(result: "RecipeList") -> RenderableType:
    """Return one row per recipe, or per group of recipes with one model on similar data."""
    recipes = _recipes_listing(result).table
    if result.in_full:
        table = text_table(recipes.head, recipes.rows, 2, fold=True)
        table.columns[0].no_wrap = True
        return table
    groups = _recipe_groups(recipes.rows)
    rows = [
        ("\n".join(names), str(sum(names.values())), description)
        for description, names in groups.items()
    ]
    table = text_table(("recipes", "number", "what they train"), rows, 1, fold=True)
    table.columns[0].no_wrap, table.columns[2].justify = True, "left"
    return Group(table, Text(_recipes_hint(recipes.rows)))


def _recipe_groups(rows: Sequence[Sequence[str]]) -> dict[str, Counter[str]]:
    """Count recipes by description and by the first two parts of their names."""
    groups: dict[str, Counter[str]] = {}
    for name, description in rows:
        data, size, _ = name.split("-", 2)
        groups.setdefault(description, Counter())[f"{data}-{size}-"] += 1
    return groups


def _recipes_hint(rows: Sequence[Sequence[str]]) -> str:
    """Explain how recipe names continue, with an example."""
    example = rows[0][0]
    return (
        f"Each name goes on with a gate or task, such as {example}. `tieline train --list --all` "
        f"shows all {len(rows)}."
    )


PLAN = listing_views(_training_plan_listing, _training_plan_view)
RECIPES = listing_views(_recipes_listing, _recipes_view)
