"""The worked example of the documentation, on few tokens."""

import os
import re
import subprocess
import sys
from pathlib import Path


def test_a_quantised_router_is_priced():
    done = subprocess.run(
        [sys.executable, "examples/router_precision.py", "512"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kept = [float(x) for x in re.findall(r"([\d.]+) % of choices kept", done.stdout)]
    assert len(kept) == 3
    assert kept[0] < 95 < kept[2]  # int4, int8
    assert len(re.findall(r"layers [\d, ]+: \d+ % of the damage", done.stdout)) == 3
    assert "28,672 bytes more" in done.stdout
