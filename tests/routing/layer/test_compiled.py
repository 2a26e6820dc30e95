"""Gates, routers and layer give equal results compiled and eager."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.cpu("a process of its own, without the device")
@pytest.mark.parametrize(
    "options",
    [
        ("aot_eager", "--some"),
        pytest.param(("aot_eager",), marks=pytest.mark.slow),
        pytest.param(("inductor",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_compiled_equals_eager(options):
    command = [sys.executable, "-m", "tests.routing.compiled", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
