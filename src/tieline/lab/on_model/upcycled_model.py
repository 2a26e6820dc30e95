"""Turn a dense model into a Mixture of Experts with copies of its feed-forward networks.

    upcycle_(model, n_experts=8, k=2)

    y = Σ_{e ∈ top-k} w_e f_e(x),   w = softmax(Wx) on the k largest, divided by its sum

All experts of a layer are equal at first and their weights sum to 1, so the model's function stays
the same to rounding. `noise` makes the experts differ; training does so by data. Router and experts
have the interface of transformers' own blocks, so capture, audits, smoothing and rerouting work on
the result.

Feed-forward networks are recognised by the names and types of their parts:

layout   parts                                                          models
gated    gate_proj, up_proj, down_proj, activation                      Llama, Mistral, Qwen2, Gemma
fused    gate_up_proj (gate, then up), down_proj, activation            Phi-3, GLM-4
plain    fc1, activation, fc2                                           ViT, CLIP, SigLIP
bert     intermediate.dense, its activation; output.dense               BERT, RoBERTa, DeiT-like

Names do not determine what a forward pass computes, so every network is compared with the model's
own forward pass and copied before the first one is replaced: all are changed, or none.
"""

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.core.ranking import stable_topk
from tieline.models.experts import experts_forward
from tieline.models.families import RouterFamily, family_of, register_family
from tieline.models.saved_models import Restorer, record_change, refuse_quantised, register_restorer
from tieline.run.forward import evaluation_mode

ACTIVATION_ATTRIBUTES = ("act_fn", "activation_fn", "act", "intermediate_act_fn")


@dataclass(frozen=True)
class _FFNLayout:
    """Paths of the maps, the replaced module and the activation's holder, within a network."""

    first: tuple[str, ...]
    last: str
    gated: bool
    replaced: str = ""
    holder: str = ""  # module that holds the activation


_FFN_LAYOUTS = (
    _FFNLayout(("gate_proj", "up_proj"), "down_proj", gated=True),
    _FFNLayout(("gate_up_proj",), "down_proj", gated=True),
    _FFNLayout(("fc1",), "fc2", gated=False),
    _FFNLayout(("intermediate.dense",), "output.dense", False, "intermediate", "intermediate"),
)


@dataclass(frozen=True)
class DenseFFN:
    """One feed-forward network W_out h(W_in x + b_in) + b_out of a model.

    Attributes:
        name: qualified name of the module that holds its parts.
        replaced: name of the module that the mixture replaces.
        emptied: name of the map that becomes the identity, if the network spans two modules.
        gated: whether h(a) = φ(a_1) · a_2.
        first: the input maps; two if gate and up are separate.
        last: the output map.
        activation: φ.
    """

    name: str
    replaced: str
    emptied: str | None
    gated: bool
    first: tuple[nn.Linear, ...]
    last: nn.Linear
    activation: nn.Module

    @property
    def dim(self) -> int:
        """Dimension D of a token."""
        return self.first[0].in_features

    @property
    def w_in(self) -> Float[Tensor, "inner dim"]:
        """The input maps, the activated branch first."""
        return torch.cat([linear.weight for linear in self.first])

    @property
    def b_in(self) -> Float[Tensor, " inner"] | None:
        """Biases of the input maps; None if no map of the network has one."""
        return (
            torch.cat([_bias_or_zeros(linear) for linear in self.first]) if self.has_bias else None
        )

    @property
    def b_out(self) -> Float[Tensor, " dim"] | None:
        """Bias of the output map; None if no map of the network has one."""
        return _bias_or_zeros(self.last) if self.has_bias else None

    @property
    def has_bias(self) -> bool:
        """Whether any of the maps has a bias."""
        return any(linear.bias is not None for linear in (*self.first, self.last))

    def __call__(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """Compute the network from its parts, as the model's own forward pass should."""
        inner = torch.cat([linear(x) for linear in self.first], dim=-1)
        if not self.gated:
            return self.last(self.activation(inner))
        gate, up = inner.chunk(2, dim=-1)
        return self.last(self.activation(gate) * up)


def find_dense_ffns(model: nn.Module) -> dict[str, DenseFFN]:
    """Return the feed-forward networks of a model by name, in order of depth."""
    networks = {}
    for name, module in model.named_modules():
        for layout in _FFN_LAYOUTS:
            ffn = _dense_ffn(name, module, layout)
            if ffn is not None:
                networks[name] = ffn
    return networks


def _dense_ffn(name: str, module: nn.Module, layout: _FFNLayout) -> DenseFFN | None:
    """Return a module's feed-forward network in this layout; None if it does not fit."""
    first = tuple(_submodule(module, path) for path in layout.first)
    last, holder = _submodule(module, layout.last), _submodule(module, layout.holder)
    candidates = (
        [holder._modules.get(name) for name in ACTIVATION_ATTRIBUTES] if holder is not None else []
    )
    activation = next((module for module in candidates if module is not None), None)
    if activation is None or not isinstance(last, nn.Linear):
        return None
    maps = tuple(linear for linear in first if isinstance(linear, nn.Linear))
    inner = sum(linear.out_features for linear in maps)
    fits = inner == (2 if layout.gated else 1) * last.in_features
    if len(maps) < len(first) or not fits or maps[0].in_features != last.out_features:
        return None
    emptied = _joined_path(name, layout.last) if layout.replaced else None
    return DenseFFN(
        name, _joined_path(name, layout.replaced), emptied, layout.gated, maps, last, activation
    )


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule at a dotted path; None if there is none."""
    for step in filter(None, path.split(".")):
        child = module._modules.get(step)
        if child is None:
            return None
        module = child
    return module


def _joined_path(name: str, path: str) -> str:
    """Join a module's name and a path below it by a dot; either may be empty."""
    return ".".join(filter(None, (name, path)))


def _bias_or_zeros(linear: nn.Linear) -> Tensor:
    """Return the bias of a linear map, or zeros."""
    if linear.bias is not None:
        return linear.bias
    return linear.weight.new_zeros(linear.out_features)


Tokens = Float[Tensor, "tokens dim"]
Chosen = Float[Tensor, "tokens k"]

register_family(
    RouterFamily(
        "upcycled",
        ("UpcycledRouter",),
        renormalise="norm_topk_prob",
        note="made by `tieline upcycle` from a dense network",
    )
)


class UpcycledRouter(nn.Module):
    """Router with softmax weights of a linear map on its k best experts, in at least float32.

    Args:
        dim: D.
        n_experts: E.
        k: experts per token.
        renormalise: whether weights sum to 1.
    """

    def __init__(self, dim: int, n_experts: int, k: int, *, renormalise: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_experts, dim))
        self.top_k, self.num_experts, self.norm_topk_prob = k, n_experts, renormalise

    def forward(
        self, hidden_states: Tokens
    ) -> tuple[Float[Tensor, "tokens experts"], Chosen, Int[Tensor, "tokens k"]]:
        """Return logits, weights and experts of each token."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        logits = F.linear(hidden_states.to(dtype), self.weight.to(dtype))
        experts = stable_topk(logits.detach(), self.top_k).indices
        weights = logits.softmax(dim=-1).gather(1, experts)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, experts


class UpcycledExperts(nn.Module):
    """E feed-forward networks in stacked tensors, with the names and layout of transformers.

    Args:
        n_experts: E.
        dim: D.
        hidden: H.
        activation: φ.
        gated: whether h(a) = φ(a_1) · a_2.
        bias: whether both maps have biases.
    """

    is_transposed, is_concatenated, has_post_expert_norm = False, True, False

    def __init__(
        self,
        n_experts: int,
        dim: int,
        hidden: int,
        activation: nn.Module,
        *,
        gated: bool,
        bias: bool,
    ) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias = n_experts, gated, bias
        self.act_fn = activation
        self.first = "gate_up_proj" if gated else "up_proj"
        inner = 2 * hidden if gated else hidden
        self.register_parameter(self.first, nn.Parameter(torch.empty(n_experts, inner, dim)))
        self.down_proj = nn.Parameter(torch.empty(n_experts, dim, hidden))
        if bias:
            self.register_parameter(
                f"{self.first}_bias", nn.Parameter(torch.empty(n_experts, inner))
            )
            self.down_proj_bias = nn.Parameter(torch.empty(n_experts, dim))

    def forward(
        self, hidden_states: Tokens, top_k_index: Int[Tensor, "tokens k"], top_k_weights: Chosen
    ) -> Tokens:
        """Return Σ_j w_j f_{i_j}(x)."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class UpcycledFFN(nn.Module):
    """Router and experts that replace a dense network."""

    def __init__(self, gate: UpcycledRouter, experts: UpcycledExperts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, hidden_states: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Return the mixture's output."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, experts = self.gate(flat)
        return self.experts(flat, experts, weights).view_as(hidden_states)


FEATURE = "upcycle"
PROBE_TOKENS = 8  # tokens on which a network is compared with its parts


@dataclass(frozen=True)
class Upcycling:
    """Record of `upcycle_`.

    Attributes:
        layers: names of the networks that became mixtures.
        n_experts: experts E of each.
        k: experts per token.
        renormalise: whether the weights of a token sum to 1.
        parameters_before: parameters of the dense model.
        parameters_after: parameters of the mixture.
        parameters_per_token: parameters of the mixture that one token uses.
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
        layers: positions of networks, counted from 0, or their names; None for all.
        router_init: "normal": entries N(0, router_scale²); "orthogonal": orthogonal rows, as far as
            E <= D allows, of the mean length of normal rows.
        router_scale: size of the entries; transformers models start from 0.02.
        noise: adds N(0, (noise · root mean square)²) to every copied tensor; 0 keeps the function.
        renormalise: weights of sum 1; without it the model's function changes.
        seed: of the router and the noise.
    """
    _check_upcycling(n_experts, k, router_init, router_scale, noise)
    _check_dense(model)
    refuse_quantised(model, FEATURE)
    networks = _chosen_networks(find_dense_ffns(model), layers, type(model).__name__)
    for ffn in networks.values():
        _check_copyable(model, ffn)
    generator = torch.Generator().manual_seed(seed)
    parameters_before = parameter_count(model)
    with torch.no_grad():
        mixtures = {
            name: _mixture_of_copies(ffn, n_experts, k, renormalise, noise, generator)
            for name, ffn in networks.items()
        }
        for mixture in mixtures.values():
            _init_router(mixture.gate, router_init, router_scale, generator)
    upcycling = _upcycling_record(model, mixtures, parameters_before, renormalise)
    names = ("n_experts", "k", "renormalise")
    facts = {name: getattr(upcycling, name) for name in names} | {"layers": list(upcycling.layers)}
    record_change(model, FEATURE, facts)
    for name, ffn in networks.items():
        _replace_network(model, ffn, mixtures[name].train(model.training))
    return upcycling


def _check_upcycling(
    n_experts: int, k: int, router_init: str, router_scale: float, noise: float
) -> None:
    """Raise unless experts, k, router start and noise are in range."""
    require(n_experts >= 2, f"a mixture needs at least 2 experts, got {n_experts}")
    require(1 <= k <= n_experts, f"need 1 <= k <= experts, got {k=} of {n_experts} experts")
    kinds = ("normal", "orthogonal")
    require(router_init in kinds, f"router_init must be one of {kinds}, got {router_init!r}")
    require(0 < router_scale < math.inf, f"router_scale must be positive, got {router_scale}")
    require(0 <= noise < math.inf, f"noise must be >= 0 and finite, got {noise}")


def _check_dense(model: nn.Module) -> None:
    """Raise if the model routes already."""
    routers = [name for name, module in model.named_modules() if family_of(module) is not None]
    experts = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]
    routed = [*routers, *experts]
    if routed:
        raise UnsupportedModelError(
            f"{type(model).__name__} is a Mixture of Experts already ({', '.join(routed[:1])})"
        )


def _chosen_networks(
    networks: dict[str, DenseFFN], layers: Collection[int | str] | None, kind: str
) -> dict[str, DenseFFN]:
    """Return the networks of the given layers (index or name); all networks for None."""
    if not networks:
        raise UnsupportedModelError(
            f"{kind} has no feed-forward network of a known layout (gate_proj/up_proj/down_proj, "
            "gate_up_proj/down_proj, fc1/fc2 or intermediate/output)"
        )
    if layers is None:
        return networks
    require(len(layers) > 0, "layers must name at least one network, got none")
    names = list(networks)
    network_names = {_network_name(layer, names) for layer in layers}
    return {name: ffn for name, ffn in networks.items() if name in network_names}


def _network_name(layer: int | str, names: list[str]) -> str:
    """Return the name of the network with an index or name; raises if there is none."""
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
def _check_copyable(model: nn.Module, ffn: DenseFFN) -> None:
    """Raise if a network's forward pass does more than its parts, such as scaling."""
    weight = ffn.last.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBE_TOKENS, ffn.dim, generator=generator).to(weight)
    module = model.get_submodule(ffn.name)
    with evaluation_mode(module):
        output, copied = _outputs_before_and_after(model, ffn, x)
    rounding = 64 * torch.finfo(weight.dtype).eps
    require(
        output.shape == copied.shape
        and bool((output - copied).abs().max() <= rounding * copied.abs().max()),
        f"{ffn.name!r} ({type(module).__name__}) does more than its parts say: it cannot be copied",
        UnsupportedModelError,
    )


def _outputs_before_and_after(model: nn.Module, ffn: DenseFFN, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the model's output on x, as it is and with `ffn` in the place of the network."""
    if ffn.emptied is None:
        return model.get_submodule(ffn.name)(x), ffn(x)
    inner = model.get_submodule(ffn.replaced)
    path, _, dense = ffn.emptied.rpartition(".")
    outer = model.get_submodule(path)
    emptied = copy.deepcopy(outer)
    setattr(emptied, dense, nn.Identity())
    return outer(inner(x), x), emptied(ffn(x), x)


def empty_mixture(
    ffn: DenseFFN, n_experts: int, k: int, renormalise: bool, like: Tensor
) -> UpcycledFFN:
    """Return an uninitialised mixture in the network's shapes, with device and dtype of `like`."""
    hidden = ffn.last.in_features
    with torch.device(like.device):
        gate = UpcycledRouter(ffn.dim, n_experts, k, renormalise=renormalise)
        experts = UpcycledExperts(
            n_experts, ffn.dim, hidden, ffn.activation, gated=ffn.gated, bias=ffn.has_bias
        )
    return UpcycledFFN(gate, experts).to(like.dtype)


def _mixture_of_copies(
    ffn: DenseFFN,
    n_experts: int,
    k: int,
    renormalise: bool,
    noise: float,
    generator: torch.Generator,
) -> UpcycledFFN:
    """Return a mixture whose experts are (noisy) copies of the network."""
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


def _init_router(
    router: UpcycledRouter, init: str, scale: float, generator: torch.Generator
) -> None:
    """Draw the router's weights, normal or orthogonal, times `scale`."""
    noise = torch.randn(router.weight.shape, generator=generator)
    if init == "orthogonal":
        nn.init.orthogonal_(noise, gain=math.sqrt(noise.shape[1]), generator=generator)
    router.weight.copy_(scale * noise)


def _replace_network(model: nn.Module, ffn: DenseFFN, mixture: UpcycledFFN) -> None:
    """Replace a network by a mixture; its emptied map, if any, becomes the identity."""
    model.set_submodule(ffn.replaced, mixture)
    if ffn.emptied is not None:
        model.set_submodule(ffn.emptied, nn.Identity())


def parameter_count(model: nn.Module | None) -> int:
    """Return the number of parameters; 0 for None."""
    return 0 if model is None else sum(p.numel() for p in model.parameters())


def _upcycling_record(
    model: nn.Module, mixtures: dict[str, UpcycledFFN], parameters_before: int, renormalise: bool
) -> Upcycling:
    """Return the record; must be called before the model is changed."""
    gates = [mixture.gate for mixture in mixtures.values()]
    routers = sum(parameter_count(gate) for gate in gates)
    per_expert = sum(parameter_count(m.experts) // m.experts.num_experts for m in mixtures.values())
    n_experts, k = gates[0].num_experts, gates[0].top_k
    return Upcycling(
        layers=tuple(mixtures),
        n_experts=n_experts,
        k=k,
        renormalise=renormalise,
        parameters_before=parameters_before,
        parameters_after=parameters_before + routers + (n_experts - 1) * per_expert,
        parameters_per_token=parameters_before + routers + (k - 1) * per_expert,
    )


def _restore_upcycling(model: nn.Module, facts: dict[str, Any]) -> None:
    """Put uninitialised mixtures in place of the networks that a checkpoint names."""
    n_experts, k, names = facts.get("n_experts"), facts.get("k"), facts.get("layers")
    if not (isinstance(n_experts, int) and isinstance(k, int) and isinstance(names, list)):
        raise UnsupportedModelError(f"the checkpoint's upcycling is malformed: {facts}")
    _check_upcycling(n_experts, k, "normal", 1.0, 0.0)
    networks = find_dense_ffns(model)
    for name, ffn in _chosen_networks(networks, names, type(model).__name__).items():
        like = networks[name].last.weight
        mixture = empty_mixture(ffn, n_experts, k, bool(facts.get("renormalise", True)), like)
        _replace_network(model, ffn, mixture)


register_restorer(FEATURE, Restorer(before=_restore_upcycling))
