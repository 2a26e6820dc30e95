"""Two tasks on images: CIFAR-10, and PACS with one domain left out.

images     train on a subset of CIFAR-10's training images, score on its test images
domains    train on all domains but one, score on that one and on held-out images of the others
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tieline.core.errors import ParameterError, require
from tieline.core.files import whole_folder
from tieline.lab.training.checkpoint import save_weights
from tieline.lab.training.config import (
    MixtureConfig,
    PatchConfig,
    TrainConfig,
    VisionTransformerConfig,
)
from tieline.lab.training.fetch import DataError, data_set, fetch_checkpoint
from tieline.lab.training.image_data import DomainImages, Images, load_cifar10, load_pacs
from tieline.lab.training.image_models import (
    MixtureClassifier,
    PatchClassifier,
    RoutedVisionTransformer,
)
from tieline.routing.baselines import Smear, SoftMoE
from tieline.routing.losses import collect_routing

ROWS = 500


@dataclass(frozen=True, eq=False)
class ImageItems(Dataset[dict[str, Tensor]]):
    """Items in training order.

    Attributes:
        images: the images.
        order: index of each item's image.
        mirrored: whether left and right are swapped.
    """

    images: Images
    order: Tensor
    mirrored: Tensor

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        """Return pixels and label of one item."""
        index = self.order[at]
        pixels = self.images.pixels[index]
        if self.mirrored[at]:
            pixels = pixels.flip(1)
        return {"pixels": pixels, "labels": self.images.labels[index]}


def image_order(images: Images, n_items: int, seed: int, *, mirror: bool = True) -> ImageItems:
    """Draw `n_items` items in passes over the images, each pass in a new order."""
    require(n_items >= 1, f"a run needs an item, got {n_items}")
    draw = torch.Generator().manual_seed(seed)
    passes = -(-n_items // len(images))
    order = torch.cat([torch.randperm(len(images), generator=draw) for _ in range(passes)])
    mirrored = torch.rand(n_items, generator=draw) < (0.5 if mirror else 0.0)
    return ImageItems(images, order[:n_items], mirrored)


@contextmanager
def collect_work(model: nn.Module) -> Iterator[list[float]]:
    """Collect how many experts each layer evaluates per token.

    It is the mean of #{e: w_te ≠ 0} over tokens t for an `MoE`, E p / T for a `SoftMoE` with p
    slots for each of E experts and T tokens in a sequence, and 1 for `Smear`, without its merging.
    """
    work: list[float] = []

    def merged_expert(_layer: Any, _given: tuple[Tensor, ...], _output: Tensor) -> None:
        work.append(1.0)

    def slots_per_token(layer: Any, given: tuple[Tensor, ...], _output: Tensor) -> None:
        work.append(len(layer.phi) / given[0].shape[-2])

    with ExitStack() as hooks, collect_routing(model) as records:
        for module in model.modules():
            if isinstance(module, SoftMoE | Smear):
                count = merged_expert if isinstance(module, Smear) else slots_per_token
                hooks.callback(module.register_forward_hook(count).remove)
        yield work
        work.extend(record.routing.active.double().mean().item() for record in records)


@torch.no_grad()
def score_images(model: nn.Module, images: Images) -> dict[str, Any]:
    """Return accuracy, loss and experts per token of a model on images.

        accuracy     right answers / images
        balanced     mean over classes of right answers / images of the class

    with binomial standard errors. A constant answer has an accuracy of up to `commonest`, the share
    of the commonest class, but a balanced accuracy of `chance`, 1 / classes.

    Where experts choose among all tokens of a batch, the answer to an image depends on its batch:
    batches are drawn from all images in an order of their own, as those of training are, since
    files list the classes one after another.
    """
    images = images.subset(len(images))
    answers, loss, experts = [], 0.0, torch.zeros(())
    for rows in torch.arange(len(images)).split(ROWS):
        with collect_work(model) as work:
            output = model(pixels=images.pixels[rows], labels=images.labels[rows])
        answers.append(output.logits.argmax(dim=-1))
        loss += output.loss.item() * len(rows)
        experts = experts + torch.tensor(work, dtype=torch.float64) * len(rows)
    n, right = len(images), torch.cat(answers) == images.labels
    return {
        **_accuracy_with_errors(right, images.labels),
        "loss": loss / n,
        "images": n,
        "chance": 1 / len(images.classes),
        "experts": (experts / n).tolist(),
    }


def _accuracy_with_errors(right: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy over images and over occurring classes, with standard errors."""
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


@dataclass(frozen=True, eq=False)
class ImageData:
    """Training items, and the images to score by the name of their score."""

    train: ImageItems
    about: str
    scored_on: dict[str, Images]


class ImageTask:
    """CIFAR-10.

    Options of the data: `images`, number of training images (all by default), `scored`, number of
    test images.
    """

    def data(self, config: TrainConfig) -> ImageData:
        """Load CIFAR-10 in training order; it is fetched if necessary."""
        options = config.data.options
        require(config.data.name == "cifar10", f"no images are called {config.data.name!r}")
        train = load_cifar10("train").subset(options.get("images", 50_000))
        test = load_cifar10("test").subset(options.get("scored", 10_000))
        items = image_order(train, config.optim.steps * config.optim.batch, config.seed)
        return ImageData(items, f"{len(train)} images of {train.source}", {"test": test})

    def model(self, config: TrainConfig) -> nn.Module:
        """Make a new classifier."""
        return image_model(config)

    def evaluate(self, model: nn.Module, data: ImageData, config: TrainConfig) -> dict[str, Any]:
        """Score each set of images."""
        model.eval()
        return {name: score_images(model, images) for name, images in data.scored_on.items()}

    def save(self, model: nn.Module, data: ImageData, folder: Path) -> None:
        """Write the weights to one file; the configuration of the run has the shape."""
        with whole_folder(folder, replace=True) as half:
            save_weights(model, half)


class DomainTask(ImageTask):
    """PACS with a domain left out; a model may be selected on the domains of training.

    Options of the data: `out`, name of the domain that is left out; `held_out`, share of the images
    of the others that are kept for validation (0.2 as in DomainBed); `file`, name of another file
    in the folder of PACS, for images of another size.
    """

    def data(self, config: TrainConfig) -> ImageData:
        """Load PACS: the other domains in training order, and the images to score."""
        options = config.data.options
        require(config.data.name == "pacs", f"no domains are called {config.data.name!r}")
        file = options.get("file")
        every = (
            load_pacs() if file is None else load_pacs(data_set("pacs") / file, check_hash=False)
        )
        _check_side(every.images, config)
        out, share = options["out"], options.get("held_out", 0.2)
        train, held, test = left_out(every, out, share, config.seed)
        items = image_order(train, config.optim.steps * config.optim.batch, config.seed)
        about = f"{len(train)} images of {every.images.source} without {out}"
        return ImageData(items, about, {"out": test, "validation": held})

    def selection_score(self, model: nn.Module, data: ImageData) -> float:
        """Accuracy on held-out images of the training domains."""
        return score_images(model, data.scored_on["validation"])["accuracy"]


def left_out(
    every: DomainImages, out: str, share: float, seed: int
) -> tuple[Images, Images, Images]:
    """Return training images, held-out images of the same domains, and the domain left out.

    Args:
        every: all images.
        out: name of the domain to leave out.
        share: held-out share of the images of each other domain.
        seed: of the held-out images.
    """
    require(out in every.domains, f"the domain {out!r} is not one of {list(every.domains)}")
    require(0 < share < 1, f"the held-out share is in (0, 1), got {share}", ParameterError)
    draw, splits = torch.Generator().manual_seed(seed), []
    for number, name in enumerate(every.domains):
        indices = (every.domain == number).nonzero().flatten()
        if name != out:
            mixed = indices[torch.randperm(len(indices), generator=draw)]
            splits.append(mixed.tensor_split([round(share * len(mixed))]))
    held, train = (torch.cat(indices) for indices in zip(*splits, strict=True))
    test = (every.domain == every.domains.index(out)).nonzero().flatten()
    return every.images.take(train), every.images.take(held), every.images.take(test)


def _check_side(images: Images, config: TrainConfig) -> None:
    """Raise if images do not have the model's size; fetch its pretrained weights."""
    side, sizes = getattr(config.model, "side", None), tuple(images.pixels.shape[1:3])
    require(sizes == (side, side), f"the model takes {side}² pixels, got {sizes}", DataError)
    pretrained = getattr(config.model, "pretrained", None)
    if pretrained is not None:
        fetch_checkpoint(pretrained)


def image_model(config: TrainConfig) -> nn.Module:
    """Make the classifier of a configuration, by the type of its shape."""
    shape = config.model
    if isinstance(shape, MixtureConfig):
        return MixtureClassifier(shape, config.gate)
    if isinstance(shape, VisionTransformerConfig):
        return RoutedVisionTransformer(shape, config.gate)
    require(isinstance(shape, PatchConfig), f"{type(shape).__name__} is no shape for images")
    assert isinstance(shape, PatchConfig)
    return PatchClassifier(shape, config.gate)
