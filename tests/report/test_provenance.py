"""Rows of provenance and timings."""

from tieline.report.provenance import dotted_rows, timing_rows


def test_nested_provenance_is_flat_and_what_is_empty_is_left_out():
    nested = {"a": {"b": 1, "c": {"d": 0}}, "e": None, "f": "", "g": [], "h": False}
    assert dotted_rows(nested) == [("a.b", 1), ("a.c.d", 0), ("h", False)]


def test_timings_are_seconds_and_rates():
    rows = timing_rows({"total": 1.25, "tokens_per_second": 3141.6})
    assert rows == [("time.total", "1.25 s"), ("tokens per second", "3,142")]
