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
    """Makes ranks that a test has for itself."""
    made = []

    def make(count, patience=60.0):
        made.append(Ranks(count, patience))
        return made[-1]

    yield make
    for each in made:
        each.close()
