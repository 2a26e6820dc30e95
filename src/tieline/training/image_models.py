"""Classifiers of images whose feed-forward parts route.

    MixtureClassifier    h ← h + MoE(norm(h)), four times on the 3072 numbers of an image
                         (paper 1, B.3: 32 experts of width 128, top 4)
    PatchClassifier      a small transformer on patches of 8×8 pixels whose last blocks route each
                         patch to 2 of 6 experts (GMoE of papers 1 and 2, cut to one core)

Both take pixels as bytes, so that a batch is small, and return logits with the loss if there are
labels.

Feed-forward networks of a dense transformer turned into `MoE` layers that any gate can train.

    f(x) = W_out φ(W_in x + b_in) + b_out   →   Σ_e w_e f_e(x),   every f_e = f at first

With weights of sum 1 the model's function does not change at first. `hf.upcycle_` does the same
with transformers' own kind of block, for models that are saved and served; this one puts in the
routing core's, whose routers, gates and losses the training engine knows.

ViT for images, with its last networks turned into mixtures: GMoE as papers 1 and 2 train it.

ViT-S/16 pretrained on ImageNet-1K, 12 blocks of width 384; the networks of the last two become 6
experts each, copies of what they were, and every patch goes to 2 of them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.modeling_outputs import ImageClassifierOutput

from tieline.core.errors import UnsupportedModelError, require
from tieline.hf.upcycle import DenseFFN, find_dense_ffns
from tieline.routing.layer import MoE, moe
from tieline.training.config import GateConfig, ModelConfig
from tieline.training.fetch import local_checkpoint
from tieline.training.image_data import as_floats

__all__ = [
    "MixtureClassifier",
    "MixtureConfig",
    "PatchClassifier",
    "PatchConfig",
    "RoutedVisionTransformer",
    "VisionTransformerConfig",
    "route_networks_",
]

Pixels = UInt8[Tensor, "images height width colours"]
Labels = Int64[Tensor, " images"]


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(ModelConfig):
    """Shape of a `MixtureClassifier`; the defaults are the paper's."""

    layers: int = 4
    n_experts: int = 32
    d_hidden: int = 128
    side: int = 32
    classes: int = 10

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"need a layer, got layers={self.layers}")


@dataclass(frozen=True, kw_only=True)
class PatchConfig(ModelConfig):
    """Shape of a `PatchClassifier`.

    Attributes:
        layers: transformer blocks.
        routed: how many of them, counted from the last, route (GMoE's "last two").
        d_model: width of a patch.
        heads: attention heads.
        d_hidden: width of a feed-forward part and of an expert.
        n_experts: experts of a routed block.
        side: pixels of an image's side; a patch stands for 8×8 of them.
        classes: number of classes.
    """

    layers: int = 2
    routed: int = 2
    d_model: int = 64
    heads: int = 4
    d_hidden: int = 128
    n_experts: int = 6
    side: int = 32
    classes: int = 7

    def __post_init__(self) -> None:
        require(1 <= self.routed <= self.layers, f"need 1 <= routed <= layers, got {self.routed}")
        fits = self.d_model % self.heads == 0 and self.d_model % 8 == 0
        require(fits, f"a width of {self.d_model} is no multiple of 8 and of {self.heads} heads")
        require(self.side % 8 == 0, f"a side is a multiple of 8 pixels, got {self.side}")


def routed_layer(
    gate: GateConfig, *, d_model: int, n_experts: int, d_hidden: int, activation: str
) -> MoE:
    """The layer that a gate's configuration asks for, its experts with biases."""
    return moe(
        d_model=d_model,
        n_experts=n_experts,
        k=gate.k,
        d_hidden=d_hidden,
        router=gate.router,
        gate=gate.gate,
        activation=activation,  # type: ignore[arg-type]
        bias=True,
        router_options=dict(gate.router_options),
        gate_options=dict(gate.gate_options),
    )


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
        """Logits of the classes, and the mean cross entropy where labels are given."""
        hidden = as_floats(pixels).flatten(1)
        for norm, layer in zip(self.norms[:-1], self.layers, strict=True):
            hidden = hidden + layer(norm(hidden))
        return _output(self.head(self.norms[-1](hidden)), labels)


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
                part
                for inner, outer in itertools.pairwise(widths)
                for part in (
                    nn.Conv2d(inner, outer, 3, stride=2, padding=1),
                    nn.GroupNorm(4, outer),
                    nn.GELU(),
                )
            )
        )
        self.positions = nn.Parameter(0.02 * torch.randn(patches, width))
        first = shape.layers - shape.routed
        self.blocks = nn.ModuleList(
            PatchBlock(shape, gate if place >= first else None) for place in range(shape.layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape.classes)

    def forward(self, pixels: Pixels, labels: Labels | None = None) -> ImageClassifierOutput:
        """Logits of the classes, and the mean cross entropy where labels are given."""
        colours_first = as_floats(pixels).permute(0, 3, 1, 2)
        hidden = self.stem(colours_first).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return _output(self.head(self.norm(hidden).mean(dim=1)), labels)


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

    def forward(self, x: Float[Tensor, "images patches width"]) -> Tensor:
        """X + attention, then x + feed-forward."""
        split = self.qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.joined(mixed)
        return x + self.mlp(self.before_mlp(x))


def _output(logits: Tensor, labels: Tensor | None) -> ImageClassifierOutput:
    loss = None if labels is None else F.cross_entropy(logits.float(), labels)
    return ImageClassifierOutput(loss=loss, logits=logits)  # type: ignore[arg-type]


PLAIN = {"gelu": F.gelu, "relu": F.relu}


def route_networks_(
    model: nn.Module, places: Sequence[int], gate: GateConfig, n_experts: int
) -> list[str]:
    """Replace networks of a model by mixtures of copies of them; returns their names.

    Args:
        model: a dense model of transformers with plain networks: BERT-like or ViT-like.
        places: which of its networks, counted from 0; from the last if negative.
        gate: how the mixtures route.
        n_experts: experts of each.
    """
    found = list(find_dense_ffns(model).values())
    fits = all(-len(found) <= place < len(found) for place in places)
    require(fits, f"the model has {len(found)} networks, got places {list(places)}")
    chosen = [found[place] for place in places]
    for ffn, layer in [(ffn, _mixture(ffn, gate, n_experts)) for ffn in chosen]:
        model.set_submodule(ffn.place, layer)
        if ffn.emptied is not None:
            model.set_submodule(ffn.emptied, nn.Identity())
    return [ffn.place for ffn in chosen]


@torch.no_grad()
def _mixture(ffn: DenseFFN, gate: GateConfig, n_experts: int) -> MoE:
    sizes = {"d_model": ffn.width, "n_experts": n_experts, "d_hidden": ffn.last.in_features}
    layer = routed_layer(gate, activation=_activation(ffn), **sizes)
    experts = layer.experts
    sources = {"w_in": ffn.w_in, "w_out": ffn.last.weight, "b_in": ffn.b_in, "b_out": ffn.b_out}
    for name, parameter in experts.named_parameters():
        source = sources[name]
        parameter.copy_(torch.zeros(()) if source is None else source.expand_as(parameter))
    return layer.to(ffn.last.weight)


def _activation(ffn: DenseFFN) -> str:
    """Name of the activation, known by its values."""
    x = torch.linspace(-4, 4, 33)
    for name, known in PLAIN.items():
        if not ffn.gated and torch.allclose(ffn.activation(x), known(x), atol=1e-6):
            return name
    kind = f"{'gated ' if ffn.gated else ''}{type(ffn.activation).__name__}"
    raise UnsupportedModelError(f"{ffn.name}: {kind} is not one of {sorted(PLAIN)}, ungated")


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
