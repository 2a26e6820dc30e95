"""Ranks that the tests of a module share."""

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="package")
def pair():
    """Two ranks."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture
def ranks():
    """Create ranks for a single test."""
    groups = []

    def make(count, patience=60.0):
        groups.append(Ranks(count, patience))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
