"""The pretended device for tests that need one whatever `--device` says."""

import pytest
import torch

from tests.device import pretended


@pytest.fixture(scope="session")
def fake() -> str:
    """The name of the pretended device; skipped where torch's private interface has moved."""
    reason = pretended.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    return pretended.register()


@pytest.fixture(autouse=True)
def _default_device():
    """These tests name the device of every tensor."""
    with torch.device("cpu"):
        yield
