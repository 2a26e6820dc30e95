"""Which parameters of a test run always, and which in the slow tier."""

import pytest


def slow(*values):
    """A parameter of the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def tiers(values, always):
    """All values as parameters; those that are not in `always` are in the slow tier."""
    assert set(always) <= set(values)
    return [value if value in always else slow(value) for value in values]


def pair_tiers(rows, columns, always):
    """All pairs of a row and a column; those that are not in `always` are in the slow tier."""
    pairs = [(row, column) for row in rows for column in columns]
    assert set(always) <= set(pairs)
    return [pair if pair in always else slow(*pair) for pair in pairs]
