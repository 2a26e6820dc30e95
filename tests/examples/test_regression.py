"""The worked example of the documentation, in its reduced form."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_mixture_wins_where_there_are_regions():
    command = [sys.executable, "examples/moe_regression.py", "--tables", "regions"]
    done = subprocess.run(
        [*command, "--folds", "2", "--rows", "400"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    head, row = done.stdout.splitlines()
    names = head.split()[1:]
    scores = dict(zip(names, (float(word) for word in row.split()[1::3]), strict=True))
    assert names == ["linear", "mixture", "forest", "boosting"]
    assert scores["mixture"] > max(scores["forest"], scores["boosting"]) + 0.1
