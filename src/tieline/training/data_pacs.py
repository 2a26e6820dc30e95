"""PACS: 9,991 images of seven classes in four domains (art, cartoon, photo, sketch).

The loader reads one .npz with `x` (images, side, side, 3) uint8, `y` and `domain` integers, and the
names `classes` and `domains`; the set at 32×32 that the recipes were measured on is known by hash.
PACS states no licence, so Tieline neither ships nor fetches it.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from tieline.errors import require
from tieline.training.archives import check_file
from tieline.training.fetch import DataError, shared_folder
from tieline.training.images import Images

__all__ = ["DomainImages", "load_pacs"]

FILE, LARGEST = "pacs32.npz", 1 << 31
SHA256 = "08edc672d7b8339ec774275377b9de9adea57bd5532dbaed9a8b5cf70345e96b"
N_BYTES = 17_281_751


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
        check_file(place, SHA256, N_BYTES)
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
        require(total <= LARGEST, f"{place} unpacks to {total} bytes, at most {LARGEST}", DataError)
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
