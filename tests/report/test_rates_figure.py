"""The figure and the table of a rate study."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tieline.core.errors import TielineError
from tieline.report.rates_figure import rates_figure, rates_figure_bytes
from tieline.report.rates_table import rates_view

SIZES = [1000, 3000, 10_000, 30_000, 100_000]


def series(loss, radius, slope=-0.5, rate=True):
    law = {"slope": slope, "low": slope - 0.04, "high": slope + 0.03, "intercept": 0.0}
    return {
        "loss": loss,
        "radius": radius,
        "start": f"r = {radius:g}",
        "sizes": SIZES,
        "mean": [n**slope for n in SIZES],
        "stderr": [0.6 * n**slope for n in SIZES],
        "rate": law if rate else None,
    }


@pytest.fixture
def study():
    model = {"gate": "cosine", "link": "softmax", "expert": "relu", "d": 32, "n_experts": 9}
    return {
        "name": "p2-1b-cosine",
        "model": model | {"parameters": 594},
        "true_experts": 8,
        "well_specified": False,
        "misfit": 0.0123,
        "loss": "L2",
        "paper": 2,
        "noise": 0.1,
        "sizes": SIZES,
        "repetitions": 20,
        "problems": 300,
        "failed": 7,
        "status": {"converged": 293, "unfinished": 7},
        "ridge": {"sizes": [], "words": ""},
        "empty_cells": 2,
        "cpu_seconds": 12.3,
        "paper_slope": -0.05,
        "series": [
            series("raw", 0.1, -0.1),
            series("raw", 0.5, -0.02, rate=False),
            series("quotient", 0.1),
            series("quotient", 0.5),
            series("function", 0.1),
            series("function", 0.5),
        ],
        "sample_size": {"words": "for error 0.1 you need about 100 samples"},
    }


def test_three_panels_with_bars_and_slopes(study):
    figure = rates_figure(study)
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
    study["ridge"]["sizes"] = [1000]
    figure = rates_figure(study)
    assert figure.get_suptitle().endswith("a ridge at n = 1,000")
    line = figure.axes[1].get_lines()[3]
    assert list(line.get_xdata()) == SIZES[1:]


def test_the_same_study_gives_the_same_bytes(study, tmp_path):
    path = tmp_path / "a.svg"
    assert rates_figure_bytes(study, path) == rates_figure_bytes(study, path)
    assert rates_figure_bytes(study, tmp_path / "a.png").startswith(b"\x89PNG")
    with pytest.raises(TielineError, match="a figure is"):
        rates_figure_bytes(study, Path("a.txt"))


def test_the_table_fits_a_terminal_and_says_what_matters(study):
    few = "n = 1,000: fewer samples than the 1,200 parameters"
    study["ridge"] = {"sizes": [1000], "words": few}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rates_view(study))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
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
        assert part in words
    assert "…" not in text
