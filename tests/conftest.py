"""Settings of the whole suite."""

import gc
import os
import sys
from contextlib import nullcontext

import jaxtyping
import pytest
import torch
from hypothesis import settings

from tests import axes
from tests.device import cpu_only, pretended
from tests.shared import shared_root

axes.install("tieline")

if shared_root().is_dir():
    os.environ.setdefault("TIELINE_DATA", str(shared_root()))

# Each worker and each command that a test starts would compile the whole package anew otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("tieline", deadline=None, max_examples=12, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=500, derandomize=False)
settings.register_profile("device", deadline=None, max_examples=3, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tieline"))


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default="cpu",
        help='run on this device: "cuda", "mps", ..., or "fake", an accelerator that is pretended',
    )


def pytest_configure(config):
    """Make `--device` the default one before modules and fixtures build anything."""
    device = config.getoption("--device")
    if device == pretended.NAME:
        reason = pretended.why_unavailable()
        if reason is not None:
            raise pytest.UsageError(f"--device {pretended.NAME}: {reason}")
        pretended.register()
    if device != "cpu":
        torch.set_default_device(device)
        settings.load_profile("device")


def pytest_ignore_collect(collection_path, config):
    """Leave tests of the pretended device to a process of their own (`tests/test_device.py`).

    The autograd engine makes its queues once, for the devices that are registered by then.
    """
    on_cpu = config.getoption("--device") == "cpu"
    return True if on_cpu and collection_path.name == "device" else None


def pytest_collection_modifyitems(config, items):
    """On another device leave out the tests that are about the CPU, each with its reason."""
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        reason = cpu_only.reason(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"about the CPU: {reason}"))


def _inputs_of(node):
    """On another device, the mode that makes the inputs of tests about records on the CPU."""
    elsewhere = node.config.getoption("--device") != "cpu"
    return pretended.RecordsOnCPU() if elsewhere and cpu_only.has_records(node) else nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Import the tests of a file where their inputs are made."""
    with _inputs_of(collector):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run a test where its inputs are made."""
    with _inputs_of(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Exclude the million objects of the imports from garbage collection during the tests."""
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
    """Use one thread: small products gain nothing from more, least of all on a busy machine."""
    from tieline.core.numerics import one_thread

    with one_thread():
        yield
