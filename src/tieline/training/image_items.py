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

        accuracy     right answers / images
        balanced     mean over classes of right answers / images of the class

    with binomial standard errors. Always saying the same has an accuracy of up to `commonest`, the
    share of the commonest class, but a balanced one of `chance`, one in as many as classes are.
    """
    said, loss, experts = [], 0.0, torch.zeros(())
    for rows in torch.arange(len(images)).split(ROWS):
        with collect_routing(model) as routing:
            output = model(pixels=images.pixels[rows], labels=images.labels[rows])
        said.append(output.logits.argmax(dim=-1))
        loss += output.loss.item() * len(rows)
        used = torch.stack([layer.routing.active.double().mean() for layer in routing])
        experts = experts + used * len(rows)
    n, right = len(images), torch.cat(said) == images.labels
    return {
        **_accuracies(right, images.labels),
        "loss": loss / n,
        "images": n,
        "chance": 1 / len(images.classes),
        "experts": (experts / n).tolist(),
    }


def _accuracies(right: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy over images and over classes that occur, with standard errors."""
    n, total = labels.bincount(), len(labels)
    present = n > 0
    recall = labels[right].bincount(minlength=len(n))[present] / n[present].double()
    accuracy, error = right.double().mean().item(), (recall * (1 - recall) / n[present]).sum()
    return {
        "accuracy": accuracy,
        "accuracy_se": (accuracy * (1 - accuracy) / total) ** 0.5,
        "balanced": recall.mean().item(),
        "balanced_se": error.sqrt().item() / len(recall),
        "commonest": n.max().item() / total,
    }
