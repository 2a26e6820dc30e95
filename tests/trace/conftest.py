"""Fixtures of the trace tests."""

import jaxtyping
import pytest


@pytest.fixture(scope="module")
def axes_unchecked():
    """Turn off the type checker, which users do not have, so that our own checks are reached."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
