"""The tests of `tests/device`, in a process where the pretended device is registered first."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import pretended

ROOT = Path(__file__).parents[1]


def test_everything_on_the_pretended_device():
    reason = pretended.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    options = ["-q", "-p", "no:cacheprovider", "--device", pretended.NAME, "tests/device"]
    command = [sys.executable, "-m", "pytest", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout[-6000:]
