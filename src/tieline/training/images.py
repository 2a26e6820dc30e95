"""Labelled images: the record that every image loader returns, and its parts."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tieline.errors import ParameterError, require
from tieline.training.fetch import DataError

__all__ = ["Images", "as_floats"]


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
