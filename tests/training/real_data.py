"""Where the real sets are, if they are."""

import pytest

from tieline.training.fetch import DataError, data_folder, shared_folder


def shared(name):
    """The folder of a set that no registry has, or a skip that says what is missing."""
    try:
        return shared_folder(name)
    except DataError as missing:
        pytest.skip(str(missing))


def fetched(name):
    """A file that was fetched before, or a skip; tests download nothing."""
    path = data_folder() / name
    if not path.is_file():
        pytest.skip(f"{path} is not here: a first training run fetches it")
    return path
