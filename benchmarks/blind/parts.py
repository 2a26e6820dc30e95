"""The parts of a transformers model that changes touch: routers, experts, attention, norms."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tieline.models import find_routers

SHARED = ("shared_expert", "shared_experts", "shared_mlp")
"""Names of shared experts on a block or its decoder layer."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers in order."""
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    return list(layers)


def embedding(model: nn.Module) -> nn.Embedding:
    """Return the table of input embeddings."""
    table = model.get_submodule("model.embed_tokens")
    assert isinstance(table, nn.Embedding)
    return table


def routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers in order of depth."""
    return list(find_routers(model).values())


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold a router and its experts, in order of depth."""
    return [model.get_submodule(name.rsplit(".", 1)[0]) for name in find_routers(model)]


def routed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers with routers, in order of depth."""
    held = {id(router) for router in routers(model)}
    return [x for x in decoder_layers(model) if any(id(m) in held for m in x.modules())]


def experts(model: nn.Module) -> list[nn.Module]:
    """Return the stacked experts of every routed layer."""
    return [block.get_submodule("experts") for block in blocks(model)]


def attentions(model: nn.Module) -> list[nn.Module]:
    """Return the attention module of every decoder layer."""
    return [layer.get_submodule("self_attn") for layer in decoder_layers(model)]


def router_weight(router: nn.Module) -> nn.Parameter:
    """Return the matrix (E, D) of a router."""
    matrices = [p for p in router.parameters() if p.ndim == 2 and p.shape[0] > 1]
    assert len(matrices) == 1, [tuple(p.shape) for p in router.parameters()]
    return matrices[0]


def selection_bias(block: nn.Module) -> Tensor | None:
    """Return the bias that a block adds to scores for the choice alone; None without one."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    biases = [tensor for name, tensor in tensors if "e_score_correction_bias" in name]
    return biases[0] if biases else None


def shared_experts(model: nn.Module) -> list[nn.Module]:
    """Return the shared expert of every layer that has one."""
    modules = model.named_modules()
    return [module for name, module in modules if name.rsplit(".", 1)[-1] in SHARED]


def gate_up(stacked: nn.Module) -> nn.Parameter:
    """Return the first matrices of stacked experts: (E, 2H, D), or (E, D, 2H) if transposed."""
    return stacked.get_parameter("gate_up_proj")


def down(stacked: nn.Module) -> nn.Parameter:
    """Return the second matrices of stacked experts: (E, D, H), or (E, H, D) if transposed."""
    return stacked.get_parameter("down_proj")


def transposed(stacked: nn.Module) -> bool:
    """Whether the matrices of stacked experts map from their last axis but one."""
    return bool(getattr(stacked, "is_transposed", False))


def matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield name, weight and contracted axis of matrices but routers, embeddings and the head."""
    apart = {id(router_weight(router)) for router in routers(model)}
    apart |= {id(embedding(model).weight), id(model.get_submodule("lm_head").weight)}
    for name, weight in model.named_parameters():
        if id(weight) in apart or weight.ndim < 2 or name.endswith("_bias"):
            continue
        owner = model.get_submodule(name.rsplit(".", 1)[0])
        yield name, weight, -2 if weight.ndim == 3 and transposed(owner) else -1


def norms(model: nn.Module) -> list[nn.Module]:
    """Return the normalisation layers."""
    return [m for m in model.modules() if "Norm" in type(m).__name__ and hasattr(m, "weight")]


@torch.no_grad()
def scale_channels(model: nn.Module, channels: Tensor, factor: float) -> None:
    """Multiply norms by `factor` on some channels and divide what reads them: same function.

    Skips layers without a norm before attention and feed-forward.
    """
    for layer in decoder_layers(model):
        children = dict(layer.named_children())
        if {"input_layernorm", "post_attention_layernorm"} <= children.keys():
            _scale(children["input_layernorm"], _readers(children["self_attn"]), channels, factor)
            after = [
                m for name, m in children.items() if name in ("mlp", "block_sparse_moe", *SHARED)
            ]
            readers = [reader for module in after for reader in _readers(module)]
            _scale(children["post_attention_layernorm"], readers, channels, factor)


def _scale(
    norm: nn.Module, readers: list[tuple[Tensor, int]], channels: Tensor, factor: float
) -> None:
    for vector in norm.parameters():
        vector[channels] *= factor
    for weight, axis in readers:
        weight.index_copy_(axis, channels, weight.index_select(axis, channels) / factor)


READERS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj")
READERS += ("input_linear", "shared_expert_gate", "wg", "gate", "router")
"""Names of modules whose matrix reads the output of a norm."""


def _readers(module: nn.Module) -> list[tuple[Tensor, int]]:
    """Matrices in a module that read its input, with the axis of the input."""
    readers = []
    for name, weight in module.named_parameters():
        owner, _, field = name.rpartition(".")
        if field == "gate_up_proj":
            readers.append((weight, 1 if transposed(module.get_submodule(owner)) else 2))
        elif field == "weight" and weight.ndim == 2 and owner.rsplit(".", 1)[-1] in READERS:
            readers.append((weight, 1))
    return readers
