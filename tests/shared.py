"""Data beside the repository, which is not part of it: `../shared/data`, or `$TIELINE_DATA`."""

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest


@cache
def shared_root():
    """The folder of data sets; beside the main checkout if this is a further worktree."""
    if folder_name := os.environ.get("TIELINE_DATA"):
        return Path(folder_name)
    here = Path(__file__).parents[1]
    command = ["git", "rev-parse", "--path-format=absolute", "--git-common-dir"]
    completed = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    roots = [here, *([Path(completed.stdout.strip()).parent] if completed.returncode == 0 else [])]
    folders = [root.parent / "shared" / "data" for root in roots]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def shared_data(name):
    """The folder of a data set, and the mark that skips a test where it is not there."""
    folder = shared_root() / name
    return folder, pytest.mark.skipif(not folder.is_dir(), reason=f"no ../shared/data/{name}")
