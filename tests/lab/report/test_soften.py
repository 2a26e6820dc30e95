"""The softening on the page and in words."""

import json
import re
from dataclasses import replace

import pytest

from tests.lab.report.zoo import make_softening
from tieline.core.statistics import Estimate
from tieline.lab.report.soften import (
    deciding_table,
    figures,
    notebook,
    page,
    slope_direction,
    soften_sentences,
    soften_table,
    summary,
    terminal,
)


@pytest.fixture(scope="module")
def result():
    return make_softening()


def chart(result):
    text = re.search(r'id="report-data">(.*?)</script>', page(result), flags=re.DOTALL)[1]
    return json.loads(text)["figures"]["soften"]["data"]


def test_measured_dots_stand_beside_predicted_lines(result):
    data = chart(result)
    assert [x["name"] for x in data if x["mode"] == "markers"] == [
        *(f"layer {i}" for i in range(3)),
        "all layers",
    ]
    lines = [x for x in data if x["mode"] == "lines"]
    assert len(lines) == 3  # the last layer has no prediction
    assert lines[0]["y"][::8] == [-0.012 * 0.01 * 2**i for i in range(3)]


def test_the_tables_name_layers_and_tokens(result):
    table, tokens = soften_table(result), deciding_table(result)
    assert [row[0] for row in table.rows] == ["0", "1", "2", "all"]
    assert all(len(row) == len(table.head) for row in table.rows)
    assert [row[0] for row in tokens.rows] == ["0", "1"]


def test_words_follow_the_sign_of_the_slope(result):
    assert soften_sentences(result)[0].startswith("A soft choice would help this model")
    worse = replace(result, predicted=Estimate(1e-4, 4e-5))
    assert soften_sentences(worse)[0].startswith("A soft choice would hurt this model")
    unclear = replace(result, predicted=Estimate(1e-5, 4e-5))
    assert "cannot be told" in soften_sentences(unclear)[0]
    assert "in 12 of 12 cases" in soften_sentences(result)[-1]
    assert slope_direction(Estimate(None)) == "tell"


def test_the_same_tokens_are_told_where_their_ratio_is_known_well(result):
    first, *others = result.together
    for error, expected in ((0.05, True), (0.4, False)):
        level = replace(first, ratio=Estimate(0.97, error))
        sentence = soften_sentences(replace(result, together=(level, *others)))[-1]
        assert ("0.97 ± 0.05 times what their gradients" in sentence) == expected


def test_every_view_tells_the_verdict(result):
    assert soften_sentences(result)[0] in summary(result)
    assert soften_sentences(result)[0] in notebook(result)
    assert terminal(result, 80)
    (axes,) = figures(result)["soften"]().axes
    assert len(axes.containers) == 4
    assert "&lt;script&gt;" in page(result)
