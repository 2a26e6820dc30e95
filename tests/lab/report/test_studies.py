"""The figure of identifiability draws what the records say."""

from pathlib import Path

import pytest

from tieline.core.errors import TielineError
from tieline.lab.estimation.derivative_tests import RankTest, SplitTest
from tieline.lab.estimation.identifiability import Identifiability
from tieline.lab.report.studies import continuity_figure, identifiability_figure
from tieline.report.matplotlib_figures import figure_bytes

NO_RANKS = RankTest("weak", 1, 1, 1.0, ())


def row(gate, expert, verdict, value=1e-3):
    split = None if value is None else SplitTest(value, value, {})
    ranks = (None, NO_RANKS, NO_RANKS)
    return Identifiability(gate, "softmax", expert, 2, 3, *ranks, 0, 0, split, verdict)


ROWS = [
    row("linear", "tanh", "identifiable"),
    row("linear", "relu", "up to scale", 1e-2),
    row("cosine", "tanh", "not identifiable", 0.0),
    row("cosine", "relu", "not applicable", None),
]


def test_each_combination_has_its_square_and_number():
    axes = identifiability_figure(ROWS).axes[0]
    labels = {text.get_position(): text.get_text() for text in axes.texts}
    assert labels == {(0, 0): "−3.0", (1, 0): "−2.0", (0, 1): "≤ −15", (1, 1): "–"}
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "linear, softmax",
        "cosine, softmax",
    ]
    colours = [patch.get_facecolor() for patch in axes.patches]
    assert len(set(colours)) == 4


def test_the_key_names_what_was_not_tested_only_where_something_was_not():
    def key(rows):
        return [text.get_text() for text in identifiability_figure(rows).legends[0].get_texts()]

    assert key(ROWS)[3:] == ["not tested: this router has no zero row"]
    assert key(ROWS[:3]) == ["identifiable", "up to scale", "not identifiable"]


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_the_same_rows_give_the_same_bytes(suffix):
    path = Path("figure" + suffix)
    first, again = (figure_bytes(lambda: identifiability_figure(ROWS), path) for _ in range(2))
    assert first == again
    assert len(first) > 500


def test_no_rows_are_refused():
    with pytest.raises(TielineError, match="at least one row"):
        identifiability_figure([])
    with pytest.raises(TielineError, match="at least one layer"):
        continuity_figure([])
