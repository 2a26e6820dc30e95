"""JSON by strangers."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.errors import TraceError
from tieline.core.records import DEEPEST, LONGEST, canonical, parse_json

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_values_survive_and_have_one_text(value):
    text = canonical(value)
    assert parse_json(text.encode(), "x") == value
    assert canonical(json.loads(text)) == text


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(TraceError):
        parse_json(data, "x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "not valid JSON"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), "deeper than 32"),
        (b'{"a":1,"a":2}', "repeated"),
        (b"NaN", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"1e999", "no JSON value: inf"),
        (b"9223372036854775808", "no JSON value"),
        (b"1" * 10_000, "not valid JSON"),
        (b'"\\ud800"', "no JSON value"),
        (b'{"\\ud800":1}', "no JSON value"),
        (b"\xff", "not valid JSON"),
        (b"", "not valid JSON"),
        (b" " * (LONGEST + 1), "at most"),
    ],
)
def test_what_json_does_not_define_is_refused(data, message):
    with pytest.raises(TraceError, match=message):
        parse_json(data, "x")


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, float("nan"), 1 << 63, "\ud800"])
def test_values_that_are_not_json_are_not_written(value):
    with pytest.raises(TraceError, match="provenance"):
        canonical(value)
