"""What the user typed, read or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.cli.input import layer_choice, share, with_json_target, with_new_names
from tieline.core.errors import ParameterError


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["inspect"], ["inspect"]),
        (["inspect", "--json"], ["inspect", "--json", "-"]),
        (["--json", "-", "m"], ["--json", "-", "m"]),
        (["--json", "a.json", "m"], ["--json", "a.json", "m"]),
        (["--json", "model/id"], ["--json", "-", "model/id"]),
        (["--json", "--seed", "1"], ["--json", "-", "--seed", "1"]),
        (["--json=x.json"], ["--json=x.json"]),
    ],
)
def test_a_bare_json_option_means_stdout(typed, read):
    assert with_json_target(typed) == read


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8))
def test_places_of_layers_are_read_as_written(places):
    assert layer_choice(",".join(map(str, places))) == places


def test_ranges_and_names_of_layers():
    assert layer_choice(None) is None
    assert layer_choice("0, 2,5-7") == [0, 2, 5, 6, 7]
    assert layer_choice("model.layers.3.mlp.gate") == ["model.layers.3.mlp.gate"]


@pytest.mark.parametrize("words", ["", "1,,2", ",", "5-3", "0-999999", "1, "])
def test_layers_that_make_no_sense_are_refused(words):
    with pytest.raises(ParameterError, match="--layers"):
        layer_choice(words)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["inspect", "--out", "r.html"], ["inspect", "--html", "r.html"]),
        (["diff", "a", "b", "--out=d.html"], ["diff", "a", "b", "--html=d.html"]),
        (["diff", "--experts-a", "eager"], ["diff", "--experts-impl-a", "eager"]),
        (
            ["smooth", "--out", "m", "--experts", "x"],
            ["smooth", "--out", "m", "--experts-impl", "x"],
        ),
        (["upcycle", "--experts", "8"], ["upcycle", "--n-experts", "8"]),
        (["rates", "--engine", "dask"], ["rates", "--executor", "dask"]),
        (["--version"], ["--version"]),
        ([], []),
    ],
)
def test_old_names_of_options_keep_working(typed, read):
    assert with_new_names(typed) == read


@pytest.mark.parametrize(
    ("words", "value"), [("0.01", 0.01), ("1%", 0.01), ("0", 0.0), (None, None)]
)
def test_shares_are_read(words, value):
    assert share("--most", words) == value


@pytest.mark.parametrize("words", ["often", "2", "-1%", "nan"])
def test_what_is_no_share_is_refused_with_its_option(words):
    with pytest.raises(ParameterError, match="--most"):
        share("--most", words)
