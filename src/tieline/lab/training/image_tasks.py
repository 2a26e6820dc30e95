"""Two tasks on images: CIFAR-10, and PACS with one domain left out.

images     train on a subset of CIFAR-10's training images, score on its test images
domains    train on all domains but one, score on that one and on held-out images of the others

Classifiers with routed feed-forward parts:

    MixtureClassifier          h ← h + MoE(norm(h)), four times on the 3072 numbers of an image
                               (paper 1, B.3: 32 experts of width 128, top 4)
    PatchClassifier            a small transformer on patches of 8×8 pixels whose last blocks route
                               each patch to 2 of 6 experts (GMoE of papers 1 and 2, for one core)
    RoutedVisionTransformer    ViT-S/16 pretrained on ImageNet-1K, 12 blocks of width 384; the
                               networks of the last two become 6 experts each, copies of what they
                               were, and every patch goes to 2 of them: GMoE as the papers train it

All take pixels as bytes, so that a batch is small, and return logits, with the loss if labels are
given.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification
from transformers.modeling_outputs import ImageClassifierOutput

from tieline.core.errors import ParameterError, require
from tieline.core.files import whole_folder
from tieline.lab.training.checkpoint import save_weights
from tieline.lab.training.config import (
    GateConfig,
    MixtureConfig,
    PatchConfig,
    TrainConfig,
    VisionTransformerConfig,
)
from tieline.lab.training.data_files import DataError, data_set, fetch_checkpoint, local_checkpoint
from tieline.lab.training.image_data import DomainImages, Images, as_floats, load_cifar10, load_pacs
from tieline.lab.training.routed_networks import route_networks_, routed_layer
from tieline.routing.baselines import Smear, SoftMoE
from tieline.routing.losses import collect_routing

SCORED_ROWS = 500


@dataclass(frozen=True, eq=False)
class ImageItems(Dataset[dict[str, Tensor]]):
    """Images in training order, some of them mirrored."""

    images: Images  # the images
    order: Tensor  # index of each item's image
    mirrored: Tensor  # whether left and right are swapped

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        """Return pixels and label of one item."""
        index = self.order[position]
        pixels = self.images.pixels[index]
        if self.mirrored[position]:
            pixels = pixels.flip(1)
        return {"pixels": pixels, "labels": self.images.labels[index]}


def image_order(images: Images, n_items: int, seed: int, *, mirror: bool = True) -> ImageItems:
    """Return `n_items` items in passes over the images, each pass in a new random order."""
    require(n_items >= 1, f"a run needs an item, got {n_items}")
    draw = torch.Generator().manual_seed(seed)
    passes = -(-n_items // len(images))
    order = torch.cat([torch.randperm(len(images), generator=draw) for _ in range(passes)])
    mirrored = torch.rand(n_items, generator=draw) < (0.5 if mirror else 0.0)
    return ImageItems(images, order[:n_items], mirrored)


@contextmanager
def collect_experts_per_token(model: nn.Module) -> Iterator[list[float]]:
    """Context manager that collects how many experts each layer evaluates per token.

    It is the mean of #{e: w_te ≠ 0} over tokens t for an `MoE`, E p / T for a `SoftMoE` with p
    slots for each of E experts and T tokens in a sequence, and 1 for `Smear`, without its merging.
    """
    experts_per_token: list[float] = []

    def merged_expert(_layer: Any, _given: tuple[Tensor, ...], _output: Tensor) -> None:
        experts_per_token.append(1.0)

    def slots_per_token(layer: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        experts_per_token.append(len(layer.phi) / inputs[0].shape[-2])

    with ExitStack() as hooks, collect_routing(model) as records:
        for module in model.modules():
            if isinstance(module, SoftMoE | Smear):
                count = merged_expert if isinstance(module, Smear) else slots_per_token
                hooks.callback(module.register_forward_hook(count).remove)
        yield experts_per_token
        experts_per_token.extend(record.routing.active.double().mean().item() for record in records)


@torch.no_grad()
def score_images(model: nn.Module, images: Images) -> dict[str, Any]:
    """Return accuracy, loss and experts per token of a model on images.

        accuracy     right answers / images
        balanced     mean over classes of right answers / images of the class

    with binomial standard errors. A constant answer has an accuracy of up to `commonest`, the share
    of the commonest class, but a balanced accuracy of `chance`, 1 / classes.

    If experts choose among all tokens of a batch, the answer to an image depends on its batch.
    Images are therefore shuffled into batches as in training, since files list them class by class.
    """
    images = images.subset(len(images))
    answers, loss, experts = [], 0.0, torch.zeros(())
    for rows in torch.arange(len(images)).split(SCORED_ROWS):
        with collect_experts_per_token(model) as experts_per_token:
            output = model(pixels=images.pixels[rows], labels=images.labels[rows])
        answers.append(output.logits.argmax(dim=-1))
        loss += output.loss.item() * len(rows)
        experts = experts + torch.tensor(experts_per_token, dtype=torch.float64) * len(rows)
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
    """Training items, a description, and the images to score, by name of the score."""

    train: ImageItems
    about: str
    scored_on: dict[str, Images]


class ImageTask:
    """The task "images": CIFAR-10.

    Options of the data: `images`, number of training images (all by default), `scored`, number of
    test images.
    """

    def data(self, config: TrainConfig) -> ImageData:
        """Load CIFAR-10 in training order; fetch it if necessary."""
        options = config.data.options
        require(config.data.name == "cifar10", f"no images are called {config.data.name!r}")
        train = load_cifar10("train").subset(options.get("images", 50_000))
        test = load_cifar10("test").subset(options.get("scored", 10_000))
        items = image_order(train, config.optim.steps * config.optim.batch, config.seed)
        return ImageData(items, f"{len(train)} images of {train.source}", {"test": test})

    def model(self, config: TrainConfig) -> nn.Module:
        """Build a new classifier."""
        return image_model(config)

    def evaluate(self, model: nn.Module, data: ImageData, config: TrainConfig) -> dict[str, Any]:
        """Score each set of images."""
        model.eval()
        return {name: score_images(model, images) for name, images in data.scored_on.items()}

    def save(self, model: nn.Module, data: ImageData, folder: Path) -> None:
        """Write the weights to one file; the run's configuration holds the shape."""
        with whole_folder(folder, replace=True) as half:
            save_weights(model, half)


class DomainTask(ImageTask):
    """The task "domains": PACS with one domain left out, with optional model selection.

    Options of the data: `out`, name of the domain that is left out; `held_out`, share of the images
    of the others that are kept for validation (0.2 as in DomainBed); `file`, name of another file
    in the folder of PACS, for images of another size.
    """

    def data(self, config: TrainConfig) -> ImageData:
        """Load PACS: the training domains in training order, and the images to score."""
        options = config.data.options
        require(config.data.name == "pacs", f"no domains are called {config.data.name!r}")
        file = options.get("file")
        pacs = load_pacs() if file is None else load_pacs(data_set("pacs") / file, check_hash=False)
        side, sizes = getattr(config.model, "side", None), tuple(pacs.images.pixels.shape[1:3])
        require(sizes == (side, side), f"the model takes {side}² pixels, got {sizes}", DataError)
        if pretrained := getattr(config.model, "pretrained", None):
            fetch_checkpoint(pretrained)  # before anything is built
        out, share = options["out"], options.get("held_out", 0.2)
        train, validation, test = leave_out_domain(pacs, out, share, config.seed)
        items = image_order(train, config.optim.steps * config.optim.batch, config.seed)
        about = f"{len(train)} images of {pacs.images.source} without {out}"
        return ImageData(items, about, {"out": test, "validation": validation})

    def selection_score(self, model: nn.Module, data: ImageData) -> float:
        """Return the accuracy on held-out images of the training domains."""
        return score_images(model, data.scored_on["validation"])["accuracy"]


def leave_out_domain(
    pacs: DomainImages, out: str, share: float, seed: int
) -> tuple[Images, Images, Images]:
    """Return training images, held-out images of the same domains, and the domain left out.

    Args:
        pacs: all images.
        out: name of the domain to leave out.
        share: held-out share of the images of each other domain.
        seed: of the held-out images.
    """
    require(out in pacs.domains, f"the domain {out!r} is not one of {list(pacs.domains)}")
    require(0 < share < 1, f"the held-out share is in (0, 1), got {share}", ParameterError)
    draw, splits = torch.Generator().manual_seed(seed), []
    for number, name in enumerate(pacs.domains):
        indices = (pacs.domain == number).nonzero().flatten()
        if name != out:
            mixed = indices[torch.randperm(len(indices), generator=draw)]
            splits.append(mixed.tensor_split([round(share * len(mixed))]))
    validation, train = (torch.cat(indices) for indices in zip(*splits, strict=True))
    test = (pacs.domain == pacs.domains.index(out)).nonzero().flatten()
    return pacs.images.take(train), pacs.images.take(validation), pacs.images.take(test)


def image_model(config: TrainConfig) -> nn.Module:
    """Build the classifier of a configuration, by the type of its shape."""
    shape = config.model
    if isinstance(shape, MixtureConfig):
        return MixtureClassifier(shape, config.gate)
    if isinstance(shape, VisionTransformerConfig):
        return RoutedVisionTransformer(shape, config.gate)
    require(isinstance(shape, PatchConfig), f"{type(shape).__name__} is no shape for images")
    assert isinstance(shape, PatchConfig)
    return PatchClassifier(shape, config.gate)


Pixels = UInt8[Tensor, "images height width colours"]
Labels = Int64[Tensor, " images"]


class MixtureClassifier(nn.Module):
    """Residual layers of experts on whole images, then one linear map to the classes.

    Args:
        shape: sizes.
        gate: router and gate of every layer.
    """

    def __init__(self, shape: MixtureConfig, gate: GateConfig) -> None:
        super().__init__()
        width = 3 * shape.side**2
        sizes = {"d_model": width, "n_experts": shape.n_experts, "d_hidden": shape.d_hidden}
        self.layers = nn.ModuleList(
            routed_layer(gate, activation="relu", **sizes) for _ in range(shape.layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(shape.layers + 1))
        self.head = nn.Linear(width, shape.classes)

    def forward(self, pixels: Pixels, labels: Labels | None = None) -> ImageClassifierOutput:
        """Return the logits of the classes, and the mean cross entropy if labels are given."""
        hidden = as_floats(pixels).flatten(1)
        for norm, layer in zip(self.norms[:-1], self.layers, strict=True):
            hidden = hidden + layer(norm(hidden))
        return _classifier_output(self.head(self.norms[-1](hidden)), labels)


class PatchClassifier(nn.Module):
    """Three convolutions to patches, transformer blocks with routed last ones, mean, linear map.

    Args:
        shape: sizes.
        gate: router and gate of the routed blocks.
    """

    def __init__(self, shape: PatchConfig, gate: GateConfig) -> None:
        super().__init__()
        width, patches = shape.d_model, (shape.side // 8) ** 2
        widths = (3, width // 2, width, width)
        self.stem = nn.Sequential(
            *(
                module
                for inner, outer in itertools.pairwise(widths)
                for module in (
                    nn.Conv2d(inner, outer, 3, stride=2, padding=1),
                    nn.GroupNorm(4, outer),
                    nn.GELU(),
                )
            )
        )
        self.positions = nn.Parameter(0.02 * torch.randn(patches, width))
        first = shape.layers - shape.routed
        self.blocks = nn.ModuleList(
            PatchBlock(shape, gate if index >= first else None) for index in range(shape.layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape.classes)

    def forward(self, pixels: Pixels, labels: Labels | None = None) -> ImageClassifierOutput:
        """Return the logits of the classes, and the mean cross entropy if labels are given."""
        colours_first = as_floats(pixels).permute(0, 3, 1, 2)
        hidden = self.stem(colours_first).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return _classifier_output(self.head(self.norm(hidden).mean(dim=1)), labels)


class PatchBlock(nn.Module):
    """Pre-norm attention and feed-forward part, each with a residual connection."""

    def __init__(self, shape: PatchConfig, gate: GateConfig | None) -> None:
        super().__init__()
        width = shape.d_model
        self.heads = shape.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if gate is None:
            self.mlp: nn.Module = nn.Sequential(
                nn.Linear(width, shape.d_hidden), nn.GELU(), nn.Linear(shape.d_hidden, width)
            )
        else:
            sizes = {"n_experts": shape.n_experts, "d_hidden": shape.d_hidden}
            self.mlp = routed_layer(gate, d_model=width, activation="gelu", **sizes)

    def forward(self, x: Float[Tensor, "images patches dim"]) -> Tensor:
        """Return x + attention, then x + feed-forward."""
        split = self.qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.joined(mixed)
        return x + self.mlp(self.before_mlp(x))


def _classifier_output(logits: Tensor, labels: Tensor | None) -> ImageClassifierOutput:
    """Return logits with their cross entropy; no loss without labels."""
    loss = None if labels is None else F.cross_entropy(logits.float(), labels)
    return ImageClassifierOutput(loss=loss, logits=logits)  # type: ignore[arg-type]


class RoutedVisionTransformer(nn.Module):
    """ViT with routed last blocks, from pretrained weights if they are on this machine.

    Args:
        shape: sizes.
        gate: router and gate of the last blocks.
    """

    def __init__(self, shape: VisionTransformerConfig, gate: GateConfig) -> None:
        super().__init__()
        config = ViTConfig(
            hidden_size=shape.d_model,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.d_hidden,
            image_size=shape.side,
            patch_size=shape.patch,
        )
        config.num_labels = shape.classes
        folder = None if shape.pretrained is None else local_checkpoint(shape.pretrained)
        if folder is None:
            self.vit = ViTForImageClassification(config)
        else:
            self.vit = ViTForImageClassification.from_pretrained(
                folder, num_labels=shape.classes, ignore_mismatched_sizes=True
            )
        route_networks_(self.vit, range(-shape.routed, 0), gate, shape.n_experts)

    def forward(self, pixels: Pixels, labels: Labels | None = None) -> ImageClassifierOutput:
        """Return the logits of the classes, and the mean cross entropy if labels are given."""
        values = as_floats(pixels).permute(0, 3, 1, 2)
        return _classifier_output(self.vit(pixel_values=values).logits, labels)
