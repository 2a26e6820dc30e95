"""Data beside the repository, which is not part of it."""

import subprocess
from pathlib import Path

import pytest


def _roots():
    """This checkout and, for a further worktree, the repository that it belongs to."""
    here = Path(__file__).parents[1]
    yield here
    told = subprocess.run(
        ["git", "rev-parse", "--path-format=absolute", "--git-common-dir"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode == 0:
        yield Path(told.stdout.strip()).parent


def shared_data(name):
    """The folder of a data set, and the mark that skips a test where it is not there."""
    places = [root.parent / "shared" / "data" / name for root in _roots()]
    found = next((place for place in places if place.is_dir()), places[0])
    return found, pytest.mark.skipif(not found.is_dir(), reason=f"no ../shared/data/{name}")
