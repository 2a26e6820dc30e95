"""A dense model becomes a Mixture of Experts whose experts are copies of its feed-forward networks.

    upcycle_(model, n_experts=8, k=2)

With renormalised weights the function of the model is the same at first, to rounding: all experts
of a layer are equal, and their weights sum to 1. `noise` sets them apart by chance, training by
data. Nothing is changed unless everything can be: every network is found, checked against the
model's own forward pass and copied before the first one is replaced.
"""

import copy
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tieline.errors import ParameterError, UnsupportedModelError, require
from tieline.hf.dense_ffn import DenseFFN, find_dense_ffns
from tieline.hf.families import family_of
from tieline.hf.marks import Restorer, mark, register_restorer
from tieline.hf.upcycled import UpcycledExperts, UpcycledFFN, UpcycledRouter

__all__ = ["Upcycling", "upcycle_"]

FEATURE = "upcycle"
PROBES = 8  # tokens on which a network is compared with what its parts say


@dataclass(frozen=True)
class Upcycling:
    """What was done.

    Attributes:
        layers: names of the networks that became mixtures.
        n_experts: experts E of each.
        k: experts per token.
        renormalise: whether the weights of a token sum to 1.
        parameters_before: of the whole model.
        parameters_after: of the whole model.
        parameters_per_token: of the whole model, less those of experts that a token does not use.
    """

    layers: tuple[str, ...]
    n_experts: int
    k: int
    renormalise: bool
    parameters_before: int
    parameters_after: int
    parameters_per_token: int


def upcycle_(
    model: nn.Module,
    *,
    n_experts: int,
    k: int,
    layers: Collection[int | str] | None = None,
    router_init: str = "normal",
    router_scale: float = 0.02,
    noise: float = 0.0,
    renormalise: bool = True,
    seed: int = 0,
) -> Upcycling:
    """Replace feed-forward networks of a dense model by mixtures of copies of them, in place.

    Args:
        model: a dense model of transformers: Llama-like, BERT-like, ViT-like.
        n_experts: experts E >= 2 of each mixture.
        k: experts per token, 1 <= k <= E.
        layers: positions among the model's networks, counted from 0, or their names; None for all.
        router_init: "normal": entries N(0, router_scale²); "orthogonal": rows orthogonal as far as
            E <= D lets them be, of the length that normal rows have on average.
        router_scale: size of the entries, 0.02 being what transformers models start from.
        noise: every copied tensor gets N(0, (noise · its root mean square)²); 0 keeps the function.
        renormalise: weights of sum 1; without it the model's function changes at once.
        seed: of the router and the noise.
    """
    _check_numbers(n_experts, k, router_init, router_scale, noise)
    _check_dense(model)
    chosen = _chosen(find_dense_ffns(model), layers, type(model).__name__)
    for ffn in chosen.values():
        _check_parts(model, ffn)
    generator = torch.Generator().manual_seed(seed)
    before = _size(model)
    with torch.no_grad():
        made = {
            name: _filled(ffn, n_experts, k, renormalise, noise, generator)
            for name, ffn in chosen.items()
        }
        for mixture in made.values():
            _start_router(mixture.gate, router_init, router_scale, generator)
    done = _describe(model, made, before, renormalise)
    mark_upcycling(model, done)
    for name, ffn in chosen.items():
        _replace(model, ffn, made[name].train(model.training))
    return done


def mark_upcycling(model: nn.Module, done: Upcycling) -> None:
    """Note in the configuration, where there is one, what loading has to do again."""
    config = getattr(model, "config", None)
    if config is not None:
        facts = {key: asdict(done)[key] for key in ("layers", "n_experts", "k", "renormalise")}
        mark(config, FEATURE, facts | {"layers": list(done.layers)})


def _check_numbers(
    n_experts: int, k: int, router_init: str, router_scale: float, noise: float
) -> None:
    require(n_experts >= 2, f"a mixture needs at least 2 experts, got {n_experts}")
    require(1 <= k <= n_experts, f"need 1 <= k <= experts, got {k=} of {n_experts} experts")
    known = ("normal", "orthogonal")
    require(router_init in known, f"router_init must be one of {known}, got {router_init!r}")
    require(0 < router_scale < math.inf, f"router_scale must be positive, got {router_scale}")
    require(0 <= noise < math.inf, f"noise must be >= 0 and finite, got {noise}")


def _check_dense(model: nn.Module) -> None:
    routers = [name for name, module in model.named_modules() if family_of(module) is not None]
    experts = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]
    found = [*routers, *experts]
    require(
        not found,
        f"{type(model).__name__} is a Mixture of Experts already ({', '.join(found[:1])})",
        UnsupportedModelError,
    )


def _chosen(
    found: dict[str, DenseFFN], layers: Collection[int | str] | None, kind: str
) -> dict[str, DenseFFN]:
    require(
        bool(found),
        f"{kind} has no feed-forward network of a known layout (gate_proj/up_proj/down_proj, "
        "gate_up_proj/down_proj, fc1/fc2 or intermediate/output)",
        UnsupportedModelError,
    )
    if layers is None:
        return found
    require(len(layers) > 0, "layers must name at least one network, got none")
    names = list(found)
    wanted = {_name_of(layer, names) for layer in layers}
    return {name: ffn for name, ffn in found.items() if name in wanted}


def _name_of(layer: int | str, names: list[str]) -> str:
    if isinstance(layer, int) and 0 <= layer < len(names):
        return names[layer]
    require(
        layer in names,
        f"no such layer: {layer!r}; the model has {len(names)} networks, 0 to {len(names) - 1}, "
        f"named {names[0]!r} to {names[-1]!r}",
        ParameterError,
    )
    return str(layer)


@torch.no_grad()
def _check_parts(model: nn.Module, ffn: DenseFFN) -> None:
    """Refuse a network whose forward pass is not what its parts say, such as one with a scale."""
    weight = ffn.last.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBES, ffn.width, generator=generator).to(weight)
    module = model.get_submodule(ffn.name)
    training = module.training
    module.eval()
    try:
        own, parts = _own_output(model, ffn, x)
    finally:
        module.train(training)
    rounding = 64 * torch.finfo(weight.dtype).eps
    require(
        own.shape == parts.shape
        and bool((own - parts).abs().max() <= rounding * parts.abs().max()),
        f"{ffn.name!r} ({type(module).__name__}) does more than its parts say: it cannot be copied",
        UnsupportedModelError,
    )


def _own_output(model: nn.Module, ffn: DenseFFN, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the model computes on x, and what it will once a mixture equal to `ffn` is in place."""
    if ffn.emptied is None:
        return model.get_submodule(ffn.name)(x), ffn(x)
    inner = model.get_submodule(ffn.place)
    path, _, dense = ffn.emptied.rpartition(".")
    outer = model.get_submodule(path)
    emptied = copy.deepcopy(outer)
    setattr(emptied, dense, nn.Identity())
    return outer(inner(x), x), emptied(ffn(x), x)


def empty_mixture(
    ffn: DenseFFN, n_experts: int, k: int, renormalise: bool, like: Tensor
) -> UpcycledFFN:
    """A mixture of the network's shapes, without values, where and in what `like` is."""
    hidden = ffn.last.in_features
    with torch.device(like.device):
        gate = UpcycledRouter(ffn.width, n_experts, k, renormalise=renormalise)
        experts = UpcycledExperts(
            n_experts, ffn.width, hidden, ffn.activation, gated=ffn.gated, bias=ffn.has_bias
        )
    return UpcycledFFN(gate, experts).to(like.dtype)


def _filled(
    ffn: DenseFFN,
    n_experts: int,
    k: int,
    renormalise: bool,
    noise: float,
    generator: torch.Generator,
) -> UpcycledFFN:
    """A mixture whose experts are the network."""
    mixture = empty_mixture(ffn, n_experts, k, renormalise, ffn.last.weight)
    experts = mixture.experts
    sources = {experts.first: ffn.w_in, "down_proj": ffn.last.weight}
    sources |= {f"{experts.first}_bias": ffn.b_in, "down_proj_bias": ffn.b_out}
    for name, parameter in experts.named_parameters():
        source = sources[name]
        assert source is not None
        parameter.copy_(source.expand_as(parameter))
        if noise:
            size = noise * source.double().square().mean().sqrt().item()
            parameter += (size * torch.randn(parameter.shape, generator=generator)).to(parameter)
    mixture.requires_grad_(ffn.last.weight.requires_grad)
    return mixture


def _start_router(
    router: UpcycledRouter, how: str, scale: float, generator: torch.Generator
) -> None:
    drawn = torch.randn(router.weight.shape, generator=generator)
    if how == "orthogonal":
        nn.init.orthogonal_(drawn, gain=math.sqrt(drawn.shape[1]), generator=generator)
    router.weight.copy_(scale * drawn)


def _replace(model: nn.Module, ffn: DenseFFN, mixture: UpcycledFFN) -> None:
    model.set_submodule(ffn.place, mixture)
    if ffn.emptied is not None:
        model.set_submodule(ffn.emptied, nn.Identity())


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _describe(
    model: nn.Module, made: dict[str, UpcycledFFN], before: int, renormalise: bool
) -> Upcycling:
    """The record; `model` is not changed yet."""
    gates = [mixture.gate for mixture in made.values()]
    routers = sum(_size(gate) for gate in gates)
    per_expert = sum(_size(m.experts) // m.experts.num_experts for m in made.values())
    n_experts, k = gates[0].num_experts, gates[0].top_k
    return Upcycling(
        layers=tuple(made),
        n_experts=n_experts,
        k=k,
        renormalise=renormalise,
        parameters_before=before,
        parameters_after=before + routers + (n_experts - 1) * per_expert,
        parameters_per_token=before + routers + (k - 1) * per_expert,
    )


def _restore(model: nn.Module, facts: dict[str, Any]) -> None:
    """Mixtures without values in the places that a checkpoint names."""
    n_experts, k, names = facts.get("n_experts"), facts.get("k"), facts.get("layers")
    fits = isinstance(n_experts, int) and isinstance(k, int) and isinstance(names, list)
    require(fits, f"the checkpoint's upcycling is malformed: {facts}", UnsupportedModelError)
    assert isinstance(n_experts, int)
    assert isinstance(k, int)
    assert isinstance(names, list)
    _check_numbers(n_experts, k, "normal", 1.0, 0.0)
    found = find_dense_ffns(model)
    for name, ffn in _chosen(found, names, type(model).__name__).items():
        like = found[name].last.weight
        mixture = empty_mixture(ffn, n_experts, k, bool(facts.get("renormalise", True)), like)
        _replace(model, ffn, mixture)


register_restorer(FEATURE, Restorer(before=_restore))
