"""Results that several tests draw; making one takes most of a second, so it is made once."""

import pytest

from tests.report.zoo import make_inspection


@pytest.fixture(scope="session")
def result():
    return make_inspection(losses=True)


@pytest.fixture(scope="session")
def ids_only():
    return make_inspection(ids_only=True)
