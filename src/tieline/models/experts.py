"""How the experts of a model run: by which implementation, and in which slots.

    use_experts(model, "tieline")     the package's own implementation
    choice_in_slots  a weights matrix (T, E) as the K columns that experts take
    SkipRule         how a slot that no expert uses is left out

Importing `tieline.models` registers it; `register_kernel` registers it under another name.
`dispatch` computes activations that it knows, `grouped_dispatch` the families' own gates, clamps
and norms. A slot with an index of at least the number of experts, or with weight zero, is not
computed.

A slot that is not used costs nothing where the experts allow it:

    experts of transformers, eager        index E, if the family's `eager_skip` says so
    the same, grouped_mm and batched_mm   index E, with `_is_expert_parallel` set on the experts
    the same, "tieline"                   index E
    identity experts with weight 0        the index of the first of them
    all others                            one of the token's experts with weight 0
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.activations import GELUActivation, SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tieline.core.errors import ParameterError, ShapeError, UnsupportedModelError
from tieline.core.ranking import stable_topk
from tieline.models.class_changes import make_subclass, swapped_class
from tieline.models.families import RouterFamily
from tieline.models.parallel import is_sharded
from tieline.models.router_output_layouts import Choice
from tieline.routing.dispatch import dispatch, grouped_dispatch

KERNEL = "tieline"
"""The name by which transformers knows the kernel."""

_GATED = {SiLUActivation: "swiglu", nn.SiLU: "swiglu", GELUActivation: "geglu", nn.GELU: "geglu"}
_PLAIN = {nn.ReLU: "relu", GELUActivation: "gelu", nn.GELU: "gelu"}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _ExpertMaps(NamedTuple):
    """Maps and biases of the experts in the layout of `dispatch`, as views."""

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None
    b_out: Tensor | None


def register_kernel(name: str = KERNEL) -> None:
    """Let `set_experts_implementation(name)` run the experts of a model by `experts_forward`.

    Args:
        name: refused if transformers has another implementation of that name.
    """
    registered = dict(ALL_EXPERTS_FUNCTIONS).get(name, experts_forward)
    if not (name != "eager" and registered is experts_forward):
        raise ParameterError(
            f"transformers has an experts implementation {name!r} that is not ours"
        )
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Σ_j w_tj f_{i_tj}(x_t) for the experts module of any family that has the interface.

    Args:
        experts: stacked maps with the flags that transformers' decorator sets.
        hidden_states: tokens (T, D).
        top_k_index: experts (T, K); an index from the number of experts on skips the slot.
        top_k_weights: weights (T, K).
    """
    maps = _expert_maps(experts)
    weights = dense_weights(top_k_index, top_k_weights, len(maps.w_in))
    activation = _dispatch_activation(experts)
    if activation is None:
        normed = _expert_flag(experts, "has_post_expert_norm", False)
        finish = attrgetter("post_expert_norm")(experts) if normed else None
        hidden = _hidden_activation(experts)
        y = grouped_dispatch(hidden_states, weights, *maps, hidden=hidden, finish=finish)
    else:
        y = dispatch(hidden_states, weights, *maps[:3], activation=activation)
        y = y if maps.b_out is None else y + weights.to(y) @ maps.b_out.to(y)
    return y.to(hidden_states.dtype)


def dense_weights(indices: Tensor, weights: Tensor, n_experts: int) -> Tensor:
    """Sum weights (T, K) into a matrix (T, E) by their indices; leaves out indices >= E."""
    one_more = weights.new_zeros(len(weights), n_experts + 1)
    return one_more.scatter_add(1, indices.clamp(max=n_experts), weights)[:, :n_experts]


def _expert_maps(experts: nn.Module) -> _ExpertMaps:
    """The stacked tensors, or a refusal that names what is missing."""
    first = "gate_up_proj" if _expert_flag(experts, "has_gate", True) else "up_proj"
    biases = [None, None]
    tensors = [_stacked_tensor(experts, first, 3), _stacked_tensor(experts, "down_proj", 3)]
    if _expert_flag(experts, "has_bias", False):
        biases = [_stacked_tensor(experts, f"{name}_bias", 2) for name in (first, "down_proj")]
    if _expert_flag(experts, "is_transposed", False):
        tensors = [tensor.mT for tensor in tensors]
    return _ExpertMaps(tensors[0], tensors[1], biases[0], biases[1])


def _expert_flag(experts: nn.Module, name: str, default: bool) -> bool:
    """A flag that transformers' decorator sets on experts."""
    return bool(getattr(experts, name, default))


def _stacked_tensor(experts: nn.Module, name: str, axes: int) -> Tensor:
    """A stacked parameter of the experts; refuses another form."""
    tensor = getattr(experts, name, None)
    fits = isinstance(tensor, Tensor) and tensor.ndim == axes and tensor.dtype in _DTYPES
    actual = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
    if not fits:
        raise UnsupportedModelError(
            f"{type(experts).__name__}: the experts kernel {KERNEL!r} needs a stacked {name!r} of "
            f"{axes} axes in float16, bfloat16, float32 or float64, found {actual[:80]}"
        )
    assert isinstance(tensor, Tensor)
    return tensor


def _dispatch_activation(experts: nn.Module) -> str | None:
    """The activation's name in `dispatch`; None if it has none."""
    if _expert_flag(experts, "has_post_expert_norm", False):
        return None
    activation = getattr(experts, "act_fn", None)
    if isinstance(activation, nn.GELU) and activation.approximate != "none":
        return None
    if not _expert_flag(experts, "has_gate", True):
        return _PLAIN.get(type(activation))  # type: ignore[arg-type]
    usual = _family_gate(experts) is None and _expert_flag(experts, "is_concatenated", True)
    return _GATED.get(type(activation)) if usual else None  # type: ignore[arg-type]


def _family_gate(experts: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The gate of a family that does not use φ(a_1) · a_2."""
    gate = getattr(experts, "_apply_gate", None)
    return None if getattr(gate, "__qualname__", "") == "_default_apply_gate" else gate


def _hidden_activation(experts: nn.Module) -> Callable[[Tensor], Tensor]:
    """The family's own gate, φ(a_1) · a_2, or φ alone where there is no gate."""
    activation = getattr(experts, "act_fn", None)
    hidden = _family_gate(experts) if _expert_flag(experts, "has_gate", True) else activation
    if hidden is not None:
        return hidden

    def gated_hidden(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return activation(gate) * up  # type: ignore[misc]

    return gated_hidden


def can_use_experts(model: nn.Module) -> bool:
    """Whether the experts of a model have more than one implementation."""
    can = getattr(model, "_can_set_experts_implementation", None)
    return bool(can()) if callable(can) else False


def experts_implementation(model: nn.Module) -> str:
    """Return the name of the model's implementation of experts."""
    config = getattr(model, "config", None)
    return str(getattr(config, "_experts_implementation", None) or "eager")


def use_experts(model: nn.Module, name: str | None) -> None:
    """Run the experts by "eager", "grouped_mm", "batched_mm" or another registered name.

    Args:
        model: a model of transformers.
        name: the implementation; None leaves the model as it is.
    """
    if name is None:
        return
    chooser: Any = model
    if not can_use_experts(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has one implementation of its experts: {name!r} cannot be set"
        )
    try:
        chooser.set_experts_implementation(name)
    except (ValueError, RuntimeError, ImportError) as problem:
        raise ParameterError(f"experts implementation {name!r}: {problem}") from problem


@contextmanager
def using_experts(model: nn.Module, name: str | None) -> Iterator[None]:
    """Inside the block, run the experts by another implementation; None leaves them as they are."""
    before = getattr(getattr(model, "config", None), "_experts_implementation", None)
    try:
        use_experts(model, name)
        yield
    finally:
        use_experts(model, None if name is None else before)


IMPLEMENTATIONS = frozenset({"grouped_mm", "batched_mm", "tieline"})
"""Implementations that leave the index E out."""


FLAG = "_is_expert_parallel"
"""Attribute of transformers' experts that lets them leave the index E out."""


@dataclass(frozen=True)
class SkipRule:
    """When the index `sentinel` skips a slot.

    Attributes:
        sentinel: the index.
        eager: whether it skips under the family's eager experts.
        config: configuration with the `_experts_implementation` in force, read at each call since
            it may change; None where the family has one implementation only.
    """

    sentinel: int
    eager: bool
    config: Any = None

    @property
    def works(self) -> bool:
        """Whether the index skips a slot at present."""
        name = getattr(self.config, "_experts_implementation", None) or "eager"
        return self.eager if name == "eager" else name in IMPLEMENTATIONS

    def applied(
        self, ids: Int[Tensor, "tokens columns"], share: Float[Tensor, "tokens columns"]
    ) -> Int[Tensor, "tokens columns"]:
        """Replace experts of share 0 by the sentinel, if it skips them."""
        return ids.masked_fill(share == 0, self.sentinel) if self.works else ids


def experts_of(model: nn.Module, router_name: str) -> nn.Module | None:
    """Return the experts module beside a router; None if there is none."""
    parent = model.get_submodule(router_name.rpartition(".")[0])
    experts = getattr(parent, "experts", None)
    return experts if isinstance(experts, nn.Module) else None


def skip_rule(family: RouterFamily, experts: nn.Module | None, n_experts: int) -> SkipRule:
    """Return the skip rule for a router.

    Args:
        family: the record of its family.
        experts: the experts that it serves.
        n_experts: number of experts that it ranks.
    """
    if experts is not None and is_sharded(experts):
        return SkipRule(n_experts, eager=False)  # tokens are sent to experts by their numbers
    if family.identity_experts is not None:
        count, first = family.identity_experts
        if getattr(experts, count, 0):
            return SkipRule(int(getattr(experts, first, 0)), eager=True)
    if experts is None or not hasattr(experts, FLAG):
        return SkipRule(n_experts, eager=family.eager_skip == "always")
    config = getattr(experts, "config", None)
    return SkipRule(n_experts, eager=family.eager_skip != "never", config=config)


def choice_in_slots(
    weights: Float[Tensor, "tokens experts"], skip: SkipRule, columns: int | None = None
) -> Choice:
    """Return weights and indices (T, K), the largest weight first; gradients reach `weights`.

    Args:
        weights: exact zeros where an expert is not used.
        skip: how the experts skip an unused slot, whose weight is 0.
        columns: K; by default the largest number of experts that a token here uses.
    """
    used = int((weights != 0).sum(dim=1).max()) if len(weights) else 0
    columns = max(used, 1) if columns is None else columns
    if not (used <= columns <= weights.shape[1]):
        raise ShapeError(
            f"need {used} (experts of a token) <= columns <= {weights.shape[1]} (experts), "
            f"got {columns=}"
        )
    ids = stable_topk(weights.detach().abs(), columns).indices
    chosen = weights.gather(1, ids)
    return Choice(chosen, skip.applied(ids, chosen))


@contextmanager
def used_slots_only(experts: nn.Module | None) -> Iterator[None]:
    """Inside the block, experts run by grouped_mm are given the slots that are used, one per row.

    A smoothed router returns as many columns as the token with the most experts needs, and marks
    the others by the index E. grouped_mm leaves these out of its products, but gathers, activates,
    masks and, under an emulated format, rounds all T·K rows. Products, and the sum over a token's
    K slots, are the same here, bit by bit. Holds on the CPU without gradients; other calls, and
    experts that are cut over processes, run as always.

    Args:
        experts: the experts beside a smoothed router; None where there are none.
    """
    if experts is None or not hasattr(experts, FLAG) or is_sharded(experts):
        yield
        return
    cls = type(experts)
    forward = partialmethod(_used_slots, cls.forward)
    with swapped_class(experts, make_subclass(cls, forward=forward)):
        yield


def _used_slots(
    experts: nn.Module,
    sparse_experts: Callable[..., Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Σ_j w_tj f_{i_tj}(x_t) by a forward of transformers that is given the used slots alone."""
    name = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    ids = top_k_index.reshape(-1)
    used = (ids < attrgetter("num_experts")(experts)).nonzero().squeeze(1)
    on_cpu = hidden_states.device.type == "cpu" and not torch.is_grad_enabled()
    if name != "grouped_mm" or not on_cpu or len(used) in (0, len(ids)):
        return sparse_experts(experts, hidden_states, top_k_index, top_k_weights)
    tokens, columns = top_k_index.shape
    rows = hidden_states[used // columns]
    flag = getattr(experts, FLAG)
    setattr(experts, FLAG, False)  # no index E is given: nothing to mask
    try:
        outputs = sparse_experts(
            experts, rows, ids[used, None], top_k_weights.reshape(-1)[used, None]
        )
    finally:
        setattr(experts, FLAG, flag)
    slots = outputs.new_zeros(tokens * columns, outputs.shape[-1]).index_copy_(0, used, outputs)
    return slots.view(tokens, columns, -1).sum(dim=1)
