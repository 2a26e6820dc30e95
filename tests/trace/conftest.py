"""Fixtures of the trace tests."""

import jaxtyping
import pytest


@pytest.fixture(scope="module")
def axes_unchecked():
    """What a user meets: outside pytest no type checker stands before our own checks."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
