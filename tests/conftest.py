"""Settings of the whole suite."""

import gc
import os
import sys

import jaxtyping
import pytest
import torch
from hypothesis import settings

from tests import axes
from tests.shared import shared_root

axes.install("tieline")

if shared_root().is_dir():
    os.environ.setdefault("TIELINE_DATA", str(shared_root()))

# Each worker and each command that a test starts would compile the whole package anew otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("tieline", deadline=None, max_examples=12, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=500, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tieline"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Look for garbage among what the tests make, not among a million objects of the imports."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def no_axis_checks():
    """Turn the run-time checks of annotations off, as they are for users."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def single_thread():
    """Small products only wait for each other on more threads, above all on a busy machine."""
    from tieline.core.numerics import one_thread

    with one_thread():
        yield
