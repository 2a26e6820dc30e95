"""Data beside the repository, which is not part of it: `../shared/data`, or `$TIELINE_DATA`."""

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest


@cache
def shared_root():
    """The folder of data sets; beside the main checkout if this is a further worktree."""
    if named := os.environ.get("TIELINE_DATA"):
        return Path(named)
    here = Path(__file__).parents[1]
    words = ["git", "rev-parse", "--path-format=absolute", "--git-common-dir"]
    told = subprocess.run(words, cwd=here, capture_output=True, text=True, check=False)
    roots = [here, *([Path(told.stdout.strip()).parent] if told.returncode == 0 else [])]
    places = [root.parent / "shared" / "data" for root in roots]
    return next((place for place in places if place.is_dir()), places[0])


def shared_data(name):
    """The folder of a data set, and the mark that skips a test where it is not there."""
    found = shared_root() / name
    return found, pytest.mark.skipif(not found.is_dir(), reason=f"no ../shared/data/{name}")
