"""What the user typed, read or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.cli.input import layer_choice, read_text, with_json_target
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


def test_a_text_is_read_with_the_name_of_its_file(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffGrüße\r\n".encode())
    assert read_text(tmp_path / "a.txt") == ("Grüße\r\n", "a.txt")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"PK\x03\x04\0\0", "is a binary file"),
        (b"caf\xe9", "is not UTF-8 text: byte 0xe9 at offset 3"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, data, words):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(ParameterError, match=words):
        read_text(tmp_path / "a.txt")


def test_a_text_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ParameterError, match="no such file"):
        read_text(tmp_path / "a.txt")
    with pytest.raises(ParameterError, match="not a file"):
        read_text(tmp_path)
