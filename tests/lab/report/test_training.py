"""A training run, its plan and the recipes, drawn from their records."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tieline.lab.report import training
from tieline.lab.training.recipes import RecipeList
from tieline.lab.training.training_run import TrainingPlan, TrainingResult

CONFIG = {
    "recipe": "a-<b>recipe</b>",
    "optim": {"steps": 20, "betas": [0.9, 0.98]},
    "seed": 3,
    "note": "",
}
HISTORY = tuple(
    {"step": n, "loss": 5.0 / n, "task_loss": 4.0 / n, "routing/gap_p50": 0.1 / n, "epoch": 1.0}
    for n in (5, 10)
)


@pytest.fixture
def result():
    scores = {"validation": {"bpc": 6.1779, "windows": 16}, "smoothing": None}
    return TrainingResult(
        CONFIG, 24_928, "a text", scores, 1.35, 1.2, 0, (*HISTORY, {"train_runtime": 1.0}), "run"
    )


def printed(view, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def test_the_terminal_tells_size_time_scores_and_folder(result):
    assert printed(training.terminal(result, 80)).splitlines() == [
        "a-<b>recipe</b>, seed 3: 24,928 parameters, 20 steps in 1.35 s",
        "data  a text",
        "validation",
        "  bpc  6.1779",
        "  windows  16",
        "in    run",
    ]


def test_scores_of_both_splits_stand_side_by_side(result):
    splits = {"validation": {"bpc": 6.1779, "windows": 16}, "test": {"bpc": 5.25, "windows": 17}}
    both = replace(result, scores={**splits, "smoothing": {"k": 2}})
    page = " ".join(training.page(both).split())
    assert '<th scope="row">bpc</th><td>6.1779</td><td>5.2500</td>' in page
    assert page.index("Training loss") < page.index("Other scores") < page.index("Configuration")
    assert '<th scope="row">smoothing.k</th><td>2</td>' in page
    assert "Other scores" not in training.page(result)


def test_curves_are_drawn_where_something_was_logged(result):
    assert list(training.figures(result)) == ["loss", "routing"]
    lines = result.plot("loss").axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[1.0, 0.5], [0.8, 0.4]]
    assert len(result.plot("routing").axes[0].lines) == 1
    bare = TrainingResult(CONFIG, 1, "a text", {}, 1.0, 1.0, 0, ())
    assert training.figures(bare) == {}
    assert "steps in 1.00 s · a text" in bare.to_html()


def test_the_page_holds_scores_and_configuration_and_runs_nothing(result):
    page = training.page(result)
    assert "<script" not in page
    assert "a-&lt;b&gt;recipe&lt;/b&gt;" in page
    for phrase in ("validation</th>", "bpc</th>", "6.1779", "optim.betas", "0.90000, 0.98000"):
        assert phrase in page
    assert "note" not in page
    assert result._repr_html_().count("<img") == 2
    assert repr(result).startswith("Training of a-<b>recipe</b>, seed 3")


def test_a_plan_tells_configuration_size_data_and_time():
    plan = TrainingPlan(CONFIG, 24_929, "a text", 0.0107, 0.214)
    text = printed(training.PLAN.terminal(plan, 80))
    assert "optim\n  steps  20\n  betas  0.90000, 0.98000\nseed  3\n\nparameters  24,929\n" in text
    assert "time        about 0.214 s here (0.0107 s a step)" in text
    assert "unknown without data" in repr(TrainingPlan(CONFIG, 1, "absent: no", None, None))
    assert "24,929" in plan.to_html()


def test_recipes_are_listed_with_their_first_line():
    recipes = RecipeList({"one": "A model.\n\nMore of it.", "two-2": "Another."})
    text = printed(training.RECIPES.terminal(recipes, 80))
    assert "A model." in text
    assert "More" not in text
    assert "two-2" in recipes.to_html()
    assert repr(recipes) == "Recipes: 2 recipes"
