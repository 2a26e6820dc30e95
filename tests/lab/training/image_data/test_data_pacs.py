"""PACS from files written by the test, and the real set if it is available."""

import numpy as np
import pytest
import torch

from tests.lab.training.real_data import shared
from tieline.lab.training.data_files import DataError
from tieline.lab.training.image_data import load_pacs


def arrays(**changes):
    defaults = {
        "x": np.arange(5 * 48, dtype=np.uint8).reshape(5, 4, 4, 3),
        "y": np.array([0, 1, 0, 1, 1], dtype=np.int8),
        "domain": np.array([0, 0, 1, 1, 2], dtype=np.int8),
        "classes": np.array(["dog", "cat"]),
        "domains": np.array(["art", "photo", "sketch"]),
    }
    return {name: value for name, value in (defaults | changes).items() if value is not None}


def saved(folder, **changes):
    path = folder / "pacs.npz"
    np.savez(path, **arrays(**changes))
    return path


def test_arrays_become_images_with_domains(tmp_path):
    pacs = load_pacs(saved(tmp_path), check_hash=False)
    assert pacs.images.pixels.shape == (5, 4, 4, 3)
    assert pacs.images.labels.tolist() == [0, 1, 0, 1, 1]
    assert pacs.domain.tolist() == [0, 0, 1, 1, 2]
    assert pacs.domains == ("art", "photo", "sketch")
    assert pacs.images.classes == ("dog", "cat")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, "lacks y"),
        ({"x": np.zeros((5, 4, 4, 3))}, "x is float64"),
        ({"x": np.zeros((5, 4, 4), dtype=np.uint8)}, "x is uint8"),
        ({"y": np.zeros(4, dtype=np.int8)}, "y is int8"),
        ({"y": np.zeros(5)}, "y is float64"),
        ({"y": np.full(5, 2)}, "labels from 2 to 2"),
        ({"domain": np.full(5, -1)}, "domains from -1"),
        ({"classes": np.array(["dog", None], dtype=object)}, "no readable"),
        ({"classes": np.array([1, 2])}, "not two names"),
    ],
)
def test_other_arrays_are_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        load_pacs(saved(tmp_path, **changes), check_hash=False)


def test_unknown_files_absent_ones_and_no_archives_are_refused(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="bytes, expected 17281751"):
        load_pacs(saved(tmp_path))
    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
    (tmp_path / "pacs").mkdir()
    with pytest.raises(DataError, match=r"PACS is not at .*pacs/pacs32\.npz.*arrays x"):
        load_pacs()
    other = tmp_path / "other.npz"
    other.write_bytes(b"no archive")
    with pytest.raises(DataError, match="no readable"):
        load_pacs(other, check_hash=False)


def test_the_real_set_has_the_sizes_of_the_paper():
    pacs = load_pacs(shared("pacs") / "pacs32.npz")
    assert len(pacs.images) == 9_991
    assert pacs.domain.bincount().tolist() == [2_048, 2_344, 1_670, 3_929]
    assert pacs.domains == ("art_painting", "cartoon", "photo", "sketch")
    assert pacs.images.pixels.shape[1:] == (32, 32, 3)
    assert pacs.images.pixels.dtype == torch.uint8
