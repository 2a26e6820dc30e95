"""The figure and the table of a rate study."""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from tieline.core.errors import TielineError
from tieline.lab.estimation.rates import (
    LossSeries,
    RateStudy,
    RidgeSizes,
    SamplesNeeded,
    StudiedModel,
)
from tieline.lab.power_law import PowerLaw
from tieline.lab.report.rates import figures, page, terminal
from tieline.report.matplotlib_figures import figure_bytes

SIZES = (1000, 3000, 10_000, 30_000, 100_000)


def series(loss, radius, slope=-0.5, rate=True):
    law = PowerLaw(slope=slope, low=slope - 0.04, high=slope + 0.03, intercept=0.0)
    return LossSeries(
        loss,
        radius,
        f"r = {radius:g}",
        SIZES,
        tuple(n**slope for n in SIZES),
        tuple(0.6 * n**slope for n in SIZES),
        law if rate else None,
    )


@pytest.fixture
def study():
    return RateStudy(
        name="p2-1b-cosine",
        model=StudiedModel("cosine", "softmax", "relu", 32, 9, 594),
        true_experts=8,
        well_specified=False,
        loss="L2",
        paper=2,
        noise=0.1,
        method="lm",
        seed=0,
        sizes=SIZES,
        repetitions=20,
        problems=300,
        failed=7,
        status={"converged": 293, "unfinished": 7},
        ridge=RidgeSizes((), ""),
        empty_cells=2,
        cpu_seconds=12.3,
        paper_slope=-0.05,
        series=(
            series("raw", 0.1, -0.1),
            series("raw", 0.5, -0.02, rate=False),
            series("quotient", 0.1),
            series("quotient", 0.5),
            series("function", 0.1),
            series("function", 0.5),
        ),
        misfit=0.0123,
        sample_size=SamplesNeeded(
            100.0, 90.0, 110.0, 0.1, True, "for error 0.1 you need about 100 samples"
        ),
        condition=None,
    )


def test_three_panels_with_bars_and_slopes(study):
    figure = study.plot()
    panels = figure.axes
    assert [panel.get_xscale() for panel in panels] == ["log"] * 3
    assert "7 of 300 not converged" in figure.get_suptitle()
    names = [[text.get_text() for text in panel.get_legend().get_texts()] for panel in panels]
    assert "start r = 0.1: −0.10 [−0.14, −0.07]" in names[0]
    assert "start r = 0.5" in names[0]
    assert "paper: −0.05" in names[0]
    assert not any("paper" in name for name in names[1])
    assert len(panels[0].containers) == 2
    line = panels[1].get_lines()[3]
    assert line.get_ydata()[0] == pytest.approx(1000**-0.5)


def test_sizes_that_a_ridge_decides_are_points_without_a_line(study):
    study = replace(study, ridge=RidgeSizes((1000,), ""))
    figure = study.plot()
    assert figure.get_suptitle().endswith("a ridge at n = 1,000")
    line = figure.axes[1].get_lines()[3]
    assert tuple(line.get_xdata()) == SIZES[1:]


def test_the_same_study_gives_the_same_bytes(study, tmp_path):
    draw = partial(figure_bytes, figures(study)["rates"])
    assert draw(tmp_path / "a.svg") == draw(tmp_path / "a.svg")
    assert draw(tmp_path / "a.png").startswith(b"\x89PNG")
    with pytest.raises(TielineError, match="a figure is"):
        draw(Path("a.txt"))


def test_the_table_fits_a_terminal_and_says_what_matters(study):
    few = "n = 1,000: fewer samples than the 1,200 parameters"
    study = replace(study, ridge=RidgeSizes((1000,), few))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(study, 80))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    output = " ".join(text.split())
    for part in (
        "9 experts for 8",
        "raw r = 0.1 -0.10 -0.14 to -0.07",
        "7 of 300 fits did not converge",
        f"warning: {few}",
        "the paper reports a slope of -0.05",
        "in 2 fits a true expert has an empty cell",
        "‖f − q‖ = 0.0123",
        "for error 0.1 you need about 100 samples",
    ):
        assert part in output
    assert "…" not in text


def test_the_page_shows_every_sample_size_and_runs_nothing(study):
    markup = page(study)
    assert all(f"n={n:,}" in markup for n in SIZES)
    assert "falls like n^-0.50" in markup
    assert markup.count("<img") == 1
    assert "<script" not in markup
    assert "falls like n^-0.50" in repr(study)
    bare = replace(study, series=tuple(replace(series, rate=None) for series in study.series))
    assert "No slope" in repr(bare)


@pytest.mark.parametrize(
    ("fitted", "expert", "sentence"),
    [
        (8, "relu", "half the error takes four times the samples"),
        (9, "relu", "1 spare expert: predictions still improve like n^(-1/2)"),
        (9, "relu", "not determined by any number of samples"),
        (10, "tanh", "2 spare experts"),
        (10, "tanh", "half their error takes sixteen times the samples"),
    ],
)
def test_the_number_of_experts_is_told_in_practice(study, fitted, expert, sentence):
    model = replace(study.model, n_experts=fitted, expert=expert)
    variant = replace(study, model=model, well_specified=True)
    assert sentence in " ".join(shown(variant).split())


def test_a_model_without_the_truth_gets_no_such_advice(study):
    assert "spare" not in shown(study)


def shown(study):
    """The terminal view as text."""
    console = Console(file=io.StringIO(), width=120)
    console.print(terminal(study, 120))
    return console.file.getvalue()
