"""Paths of the real data sets, if they are available."""

import pytest

from tieline.lab.training.data_files import DataError, data_set, find_data


def shared(name):
    """The folder of a set that no registry offers; skips the test if it is missing."""
    try:
        return data_set(name)
    except DataError as missing:
        pytest.skip(str(missing))


def fetched(name):
    """A file that was fetched before; skips the test if it is missing: tests download nothing."""
    path = find_data(name)
    if not path.is_file():
        pytest.skip(f"{path} is not here: a first training run fetches it")
    return path
