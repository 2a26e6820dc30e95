"""A few hundred mutated files of every kind; `python -m tools.fuzz 100000` tries more."""

from collections import Counter

import pytest

from tools.fuzz import make_targets, run


@pytest.mark.usefixtures("no_axis_checks")  # bad input on purpose
def test_mutated_files_are_read_or_refused_in_few_words():
    found = sum(run(300, seed=3, show=False).values(), Counter())
    assert set(found) == {"read", "refused"}
    assert found["refused"] > 150


def test_every_kind_of_file_is_there(tmp_path):
    kinds = {target.file.suffix for target in make_targets(tmp_path)}
    assert kinds >= {
        ".json",
        ".safetensors",
        ".npy",
        ".npz",
        ".csv",
        ".jsonl",
        ".txt",
        ".gguf",
    }
