"""How numbers and names are written."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.report.numbers import (
    DASH,
    compact,
    facts,
    finding_text,
    percent,
    short_names,
    significant,
)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, DASH),
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.5, "50 %"),
        (0.0234, "2.3 %"),
        (0.00021, "0.021 %"),
        (1.25e-6, "1e-4 %"),
    ],
)
def test_percent_keeps_two_digits(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, DASH),
        (0.0, "0"),
        (12345.6, "12,346"),
        (3.14159, "3.14"),
        (0.00123, "0.00123"),
        (0.000123, "1.23e-4"),
        (1.5e9, "1.50e9"),
        (-2.0, "-2.00"),
    ],
)
def test_significant_keeps_three_digits(number, text):
    assert significant(number) == text


@given(st.floats(1e-12, 1e12))
def test_significant_can_be_read_back(number):
    assert float(significant(number).replace(",", "")) == pytest.approx(number, rel=6e-3)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_compact_numbers_are_finite_and_near(number):
    short = compact({"a": [number, 7, "text", None]})["a"]
    assert short[1:] == [7, "text", None]
    if math.isfinite(number):
        assert short[0] == pytest.approx(number, rel=6e-4)
    else:
        assert short[0] is None


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["model.layers.0.mlp.gate", "model.layers.11.mlp.gate"], ["0", "11"]),
        (["encoder.0.gate", "decoder.0.gate"], ["encoder", "decoder"]),
        (["a.gate"], ["a.gate"]),
        (["a", "a.b"], ["a", "a.b"]),
        (["x.1", "x.1.y"], ["x.1", "x.1.y"]),
        ([], []),
    ],
)
def test_short_names_drop_what_all_share(names, short):
    assert short_names(names) == short


@given(st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=5, unique=True))
def test_short_names_stay_different(names):
    assert len(set(short_names(names))) == len(names)


def test_facts_name_layers_experts_and_tokens(result):
    assert facts(result) == "3 routed layers · 2 of 8 experts · 200 tokens · float32"


@pytest.mark.parametrize(
    ("text", "layer", "sentence"),
    [
        ("experts tie in layer 3", "m.3.gate", "Experts tie in layer 3."),
        ("experts tie.", "m.3.gate", "Experts tie (layer 3)."),
        ("experts tie", "other", "Experts tie (layer other)."),
        ("2 % tie", None, "2 % tie."),
    ],
)
def test_a_finding_is_a_sentence_that_names_its_layer_once(text, layer, sentence):
    assert finding_text({"text": text, "layer": layer}, {"m.3.gate": "3"}) == sentence
