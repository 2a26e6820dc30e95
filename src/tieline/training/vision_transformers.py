"""ViT for images, with its last networks turned into mixtures: GMoE as papers 1 and 2 train it.

ViT-S/16 pretrained on ImageNet-1K, 12 blocks of width 384; the networks of the last two become 6
experts each, copies of what they were, and every patch goes to 2 of them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.modeling_outputs import ImageClassifierOutput

from tieline.errors import require
from tieline.training.config import GateConfig, ModelConfig
from tieline.training.images import as_floats
from tieline.training.pretrained import local_checkpoint
from tieline.training.upcycled import route_networks_

__all__ = ["RoutedVisionTransformer", "VisionTransformerConfig"]


@dataclass(frozen=True, kw_only=True)
class VisionTransformerConfig(ModelConfig):
    """Shape of the model; the defaults are the papers'.

    Attributes:
        layers: blocks.
        routed: how many of them, counted from the last, route.
        d_model: width of a patch.
        d_hidden: width of a network and of an expert.
        heads: attention heads.
        n_experts: experts of a routed block.
        side: pixels of an image's side.
        patch: pixels of a patch's side.
        classes: number of classes.
        pretrained: name on the hub or folder of the weights to start from; None for random ones.
    """

    layers: int = 12
    routed: int = 2
    d_model: int = 384
    d_hidden: int = 1536
    heads: int = 6
    n_experts: int = 6
    side: int = 224
    patch: int = 16
    classes: int = 7
    pretrained: str | None = "WinKawaks/vit-small-patch16-224"

    def __post_init__(self) -> None:
        require(1 <= self.routed <= self.layers, f"need 1 <= routed <= layers, got {self.routed}")


class RoutedVisionTransformer(nn.Module):
    """The model at its start, pretrained where the weights are here; it takes pixels as bytes.

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
        place = None if shape.pretrained is None else local_checkpoint(shape.pretrained)
        if place is None:
            self.vit = ViTForImageClassification(config)
        else:
            self.vit = ViTForImageClassification.from_pretrained(
                place, num_labels=shape.classes, ignore_mismatched_sizes=True
            )
        route_networks_(self.vit, range(-shape.routed, 0), gate, shape.n_experts)

    def forward(
        self,
        pixels: UInt8[Tensor, "images height width colours"],
        labels: Int64[Tensor, " images"] | None = None,
    ) -> ImageClassifierOutput:
        """Logits of the classes, and the mean cross entropy where labels are given."""
        values = as_floats(pixels).permute(0, 3, 1, 2)
        logits = self.vit(pixel_values=values).logits
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)  # type: ignore[arg-type]
