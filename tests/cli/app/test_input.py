"""What the user typed, read or refused."""

from pathlib import Path
from typing import Annotated

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tieline.cli.app import in_options, layer_choice, share, with_json_target
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


@pytest.mark.parametrize(
    "typed",
    [
        ["inspect", "--json", "out.txt"],
        ["inspect", "--json", "out"],
        ["diff", "--json", "missing.npy", "b.npy"],
        ["train", "--json", "out.jsn", "demo-smoke-smoe"],
        ["reproduce", "--json", "all.txt"],
    ],
)
def test_a_word_after_json_that_is_no_json_file_is_refused_at_once(typed):
    with pytest.raises(ParameterError, match=rf"--json {typed[2]}: a file of JSON ends in"):
        with_json_target(typed)


@pytest.mark.parametrize(
    "typed",
    [
        ["inspect", "--json", "demo"],
        ["inspect", "--json", "org/Model-3.5b"],
        ["diff", "--json", str(Path(__file__)), "b"],
        ["reproduce", "--json", "p1-table6"],
        ["rates", "--json", "p2-1a-cosine"],
    ],
)
def test_an_argument_may_follow_a_bare_json_option(typed):
    assert with_json_target(typed) == [*typed[:2], "-", *typed[2:]]


def options(
    noise: Annotated[float, typer.Option()],
    router_init: Annotated[str, typer.Option()],
    json_to: Annotated[str, typer.Option("--json")],
    b: Annotated[float, typer.Option("-b")],
):
    """A command of four options."""


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("noise must be >= 0, got -1", "--noise must be >= 0, got -1"),
        ("router_init must be one of x", "--router-init must be one of x"),
        ("need 0 <= noise <= 1, got noise=2", "need 0 <= --noise <= 1, got --noise 2"),
        ("a and b must be positive: b=0", "a and -b must be positive: -b 0"),
        ("the noise of this run is large", "the noise of this run is large"),
        ("no such file: /a/noise.json", "no such file: /a/noise.json"),
        ("no layer 'router_init' here", "no layer 'router_init' here"),
    ],
)
def test_messages_name_options_and_not_arguments(said, heard):
    assert in_options(said, options) == heard


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
    ("words", "value"), [("0.01", 0.01), ("1%", 0.01), ("0", 0.0), (None, None)]
)
def test_shares_are_read(words, value):
    assert share("--most", words) == value


@pytest.mark.parametrize("words", ["often", "2", "-1%", "nan"])
def test_what_is_no_share_is_refused_with_its_option(words):
    with pytest.raises(ParameterError, match="--most"):
        share("--most", words)
