"""Images as the items of a run: drawn beforehand, flipped at random, scored in batches.

ImageItems    `steps · batch` items in the order in which they are trained on
scored        accuracy with its standard error, and what says how good it is
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tieline.errors import require
from tieline.routing.collect import collect_routing
from tieline.training.images import Images

__all__ = ["ImageItems", "epochs", "scored"]

ROWS = 500


@dataclass(frozen=True, eq=False)
class ImageItems(Dataset[dict[str, Tensor]]):
    """Items in training order.

    Attributes:
        images: what they are drawn from.
        order: place of each item's image.
        mirrored: whether its left and right are changed.
    """

    images: Images
    order: Tensor
    mirrored: Tensor

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        """Pixels and label of one item."""
        place = self.order[at]
        pixels = self.images.pixels[place]
        if self.mirrored[at]:
            pixels = pixels.flip(1)
        return {"pixels": pixels, "labels": self.images.labels[place]}


def epochs(images: Images, n_items: int, seed: int, *, mirror: bool = True) -> ImageItems:
    """As many passes over the images, each in an order of its own, as `n_items` take."""
    require(n_items >= 1, f"a run needs an item, got {n_items}")
    draw = torch.Generator().manual_seed(seed)
    passes = -(-n_items // len(images))
    order = torch.cat([torch.randperm(len(images), generator=draw) for _ in range(passes)])
    mirrored = torch.rand(n_items, generator=draw) < (0.5 if mirror else 0.0)
    return ImageItems(images, order[:n_items], mirrored)


@torch.no_grad()
def scored(model: nn.Module, images: Images) -> dict[str, Any]:
    """Accuracy, loss and experts per token of a model on images.

    Beside the accuracy stand its binomial standard error, chance (one in as many as there are
    classes) and the share of the commonest class: what always saying the same would reach.
    """
    right, loss, experts = 0, 0.0, torch.zeros(())
    for rows in torch.arange(len(images)).split(ROWS):
        with collect_routing(model) as routing:
            output = model(pixels=images.pixels[rows], labels=images.labels[rows])
        right += int((output.logits.argmax(dim=-1) == images.labels[rows]).sum())
        loss += output.loss.item() * len(rows)
        used = torch.stack([layer.routing.active.double().mean() for layer in routing])
        experts = experts + used * len(rows)
    n, accuracy = len(images), right / len(images)
    return {
        "accuracy": accuracy,
        "accuracy_se": (accuracy * (1 - accuracy) / n) ** 0.5,
        "loss": loss / n,
        "images": n,
        "chance": 1 / len(images.classes),
        "commonest": images.labels.bincount().max().item() / n,
        "experts": (experts / n).tolist(),
    }
