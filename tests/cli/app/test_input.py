"""What the user typed, read or refused."""

from pathlib import Path

import pytest

from tieline.cli.app import with_json_target
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
