"""A few hundred mutated files of every kind; `python -m tools.fuzz 100000` tries more."""

import gzip
import io
import random
from collections import Counter

import numpy as np
import pytest

from tools.fuzz import make_targets, run
from tools.hostile import hostile_archive, hostile_gzip, hostile_json, hostile_lines


@pytest.mark.usefixtures("no_axis_checks")  # bad input on purpose
def test_mutated_files_are_read_or_refused_in_few_words():
    endings = sum(run(300, seed=3, show=False).values(), Counter())
    assert set(endings) == {"read", "refused"}
    assert endings["refused"] > 150


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
        ".gz",
        ".pt",
    }


@pytest.mark.parametrize("change", [hostile_archive, hostile_gzip, hostile_json, hostile_lines])
def test_hostile_changes_are_of_the_seed_and_change_nearly_always(change):
    archive = io.BytesIO()
    np.savez(archive, routed_experts=np.arange(12).reshape(3, 2, 2))
    text = b'{"layer": 0, "ids": [1, 2]}\n' * 3
    packed = {hostile_archive: archive.getvalue(), hostile_gzip: gzip.compress(text)}
    data = packed.get(change, text if change is hostile_lines else text.splitlines()[0])
    first, again = ([change(data, random.Random(seed)) for seed in range(30)] for _ in range(2))
    if change is not hostile_archive:  # members carry the time
        assert [len(x) for x in first] == [len(x) for x in again]
    assert sum(x != data for x in first) > 20
