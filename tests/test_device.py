"""Tests on the pretended device, in a process where it is registered before any tensor is made."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import pretended

ON_DEVICE = ["device", "routing/test_routers.py", "routing/layer", "routing/test_baselines.py"]
ROOT = Path(__file__).parents[1]


def test_everything_on_the_pretended_device():
    reason = pretended.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    options = ["-q", "-p", "no:cacheprovider", "--device", pretended.NAME]
    paths = [f"tests/{path}" for path in ON_DEVICE]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout[-6000:]
