"""Image classifiers with routed feed-forward parts.

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

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.modeling_outputs import ImageClassifierOutput

from tieline.lab.training.config import (
    GateConfig,
    MixtureConfig,
    PatchConfig,
    VisionTransformerConfig,
)
from tieline.lab.training.fetch import local_checkpoint
from tieline.lab.training.image_data import as_floats
from tieline.lab.training.routed_networks import route_networks_, routed_layer

Pixels = UInt8[Tensor, "images height width colours"]
Labels = Int64[Tensor, " images"]


class MixtureClassifier(nn.Module):
    """Residual layers of experts on whole images, then one linear map to the classes.

    Args:
        shape: sizes.
        gate: how every layer routes.
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
    """Three convolutions to patches, transformer blocks of which the last route, mean, classes.

    Args:
        shape: sizes.
        gate: how the routed blocks route.
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
    """Attention and a feed-forward part, each with a norm before it and a bypass around it."""

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
    """Logits with their cross entropy; no loss without labels."""
    loss = None if labels is None else F.cross_entropy(logits.float(), labels)
    return ImageClassifierOutput(loss=loss, logits=logits)  # type: ignore[arg-type]


class RoutedVisionTransformer(nn.Module):
    """ViT with routed last blocks, from pretrained weights if they are here.

    Args:
        shape: sizes.
        gate: how the last blocks route.
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
