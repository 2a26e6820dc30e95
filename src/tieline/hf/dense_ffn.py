"""The feed-forward networks of a dense model, found by the names and kinds of their parts.

layout   parts                                                          models
gated    gate_proj, up_proj, down_proj, activation                      Llama, Mistral, Qwen2, Gemma
fused    gate_up_proj (gate, then up), down_proj, activation            Phi-3, GLM-4
plain    fc1, activation, fc2                                           ViT, CLIP, SigLIP
bert     intermediate.dense, its activation; output.dense               BERT, RoBERTa, DeiT-like

A list of parts does not say what a forward pass does with them: `upcycle_` compares outputs before
it replaces anything.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["DenseFFN", "find_dense_ffns"]

ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "intermediate_act_fn")


@dataclass(frozen=True)
class _Layout:
    """Names of the maps, below the module of the layout, and of what is replaced."""

    first: tuple[str, ...]
    last: str
    gated: bool
    place: str = ""
    holder: str = ""  # of the activation


_LAYOUTS = (
    _Layout(("gate_proj", "up_proj"), "down_proj", gated=True),
    _Layout(("gate_up_proj",), "down_proj", gated=True),
    _Layout(("fc1",), "fc2", gated=False),
    _Layout(("intermediate.dense",), "output.dense", False, "intermediate", "intermediate"),
)


@dataclass(frozen=True)
class DenseFFN:
    """One network W_out h(W_in x + b_in) + b_out of a model.

    Attributes:
        name: qualified name of the module that holds its parts.
        place: name of the module that a mixture takes the place of.
        emptied: name of the map that becomes the identity, where the network is spread over two
            modules.
        gated: whether h(a) = φ(a_1) · a_2.
        first: the input maps; two where gate and up are apart.
        last: the output map.
        activation: φ.
    """

    name: str
    place: str
    emptied: str | None
    gated: bool
    first: tuple[nn.Linear, ...]
    last: nn.Linear
    activation: nn.Module

    @property
    def width(self) -> int:
        """Width D of a token."""
        return self.first[0].in_features

    @property
    def w_in(self) -> Float[Tensor, "inner width"]:
        """The input maps, the activated branch first."""
        return torch.cat([linear.weight for linear in self.first])

    @property
    def b_in(self) -> Float[Tensor, " inner"] | None:
        """Their biases; None if no map of the network has one."""
        if not self.has_bias:
            return None
        return torch.cat([_bias(linear) for linear in self.first])

    @property
    def b_out(self) -> Float[Tensor, " width"] | None:
        """Bias of the output map."""
        return _bias(self.last) if self.has_bias else None

    @property
    def has_bias(self) -> bool:
        """Whether any of the maps has a bias."""
        return any(linear.bias is not None for linear in (*self.first, self.last))

    def __call__(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """The network as its parts say; the model's own forward is what it must equal."""
        inner = torch.cat([linear(x) for linear in self.first], dim=-1)
        if not self.gated:
            return self.last(self.activation(inner))
        gate, up = inner.chunk(2, dim=-1)
        return self.last(self.activation(gate) * up)


def find_dense_ffns(model: nn.Module) -> dict[str, DenseFFN]:
    """The networks of a model by name, in order of depth."""
    found = {}
    for name, module in model.named_modules():
        for layout in _LAYOUTS:
            ffn = _read(name, module, layout)
            if ffn is not None:
                found[name] = ffn
    return found


def _read(name: str, module: nn.Module, layout: _Layout) -> DenseFFN | None:
    first = tuple(_part(module, path) for path in layout.first)
    last, holder = _part(module, layout.last), _part(module, layout.holder)
    activation = _activation(holder)
    if activation is None or not isinstance(last, nn.Linear):
        return None
    maps = tuple(linear for linear in first if isinstance(linear, nn.Linear))
    inner = sum(linear.out_features for linear in maps)
    fits = inner == (2 if layout.gated else 1) * last.in_features
    if len(maps) < len(first) or not fits or maps[0].in_features != last.out_features:
        return None
    emptied = _join(name, layout.last) if layout.place else None
    return DenseFFN(name, _join(name, layout.place), emptied, layout.gated, maps, last, activation)


def _part(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule of that path, None if there is none."""
    for step in filter(None, path.split(".")):
        child = module._modules.get(step)
        if child is None:
            return None
        module = child
    return module


def _activation(holder: nn.Module | None) -> nn.Module | None:
    if holder is None:
        return None
    named = [holder._modules.get(name) for name in ACTIVATION_NAMES]
    return next((module for module in named if module is not None), None)


def _join(name: str, path: str) -> str:
    return ".".join(filter(None, (name, path)))


def _bias(linear: nn.Linear) -> Tensor:
    if linear.bias is not None:
        return linear.bias
    return linear.weight.new_zeros(linear.out_features)
