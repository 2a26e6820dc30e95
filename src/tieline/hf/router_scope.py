"""Knowing, while a model runs, whether one of its routers is at work: what may be perturbed there.

RouterScope      which router is running, told by hooks
position_tables  modules that compute in float32 in any model
computes_single  whether a router makes its logits in float32 whatever the model's precision
logits_matrix    the matrix (E, D) of a router whose logits are affine in its input
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor, nn

from tieline.errors import UnsupportedModelError, require
from tieline.hf.discovery import find_routers
from tieline.hf.families import family_of

__all__ = [
    "RouterScope",
    "computes_single",
    "kept_names",
    "logits_matrix",
    "modular_routers",
    "position_tables",
]


def modular_routers(model: nn.Module) -> dict[str, nn.Module]:
    """The routers by name; refuses those that are no modules of their own."""
    routers = find_routers(model)
    for name, router in routers.items():
        family = family_of(router)
        assert family is not None
        require(
            family.layout != "method" and family.refused is None,
            f"layer {name!r}: {type(router).__name__} of family {family.name!r} is no module that "
            f"routes by itself, so its precision cannot be set apart",
            UnsupportedModelError,
        )
    return routers


class RouterScope:
    """Which of these routers is running; None between their calls.

    Attributes:
        running: name of the router at work.
        exact: whether a module that computes in float32 in any model, such as a table of
            positions, is at work.
    """

    def __init__(self, routers: dict[str, nn.Module], exact: Collection[nn.Module] = ()) -> None:
        """Watch these routers, and modules that are exact whatever the model's precision."""
        self._routers, self._exact = routers, exact
        self.running: str | None = None
        self.exact = False

    @contextmanager
    def watching(self) -> Iterator["RouterScope"]:
        """Follow the calls inside this context."""
        handles = []
        for name, router in self._routers.items():
            handles.append(router.register_forward_pre_hook(self._entering(name)))
            handles.append(router.register_forward_hook(self._left, always_call=True))
        for module in self._exact:
            handles.append(module.register_forward_pre_hook(self._exactly(True)))
            handles.append(module.register_forward_hook(self._exactly(False), always_call=True))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self.running, self.exact = None, False

    def _exactly(self, begins: bool) -> Callable[..., None]:
        def told(*call: object) -> None:
            self.exact = begins

        return told

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: object) -> None:
            self.running = name

        return enter

    def _left(self, module: nn.Module, args: object, output: object) -> None:
        self.running = None


def logits_matrix(router: nn.Module) -> Tensor | None:
    """The router's matrix (E, D), None where its logits are not one product with its input."""
    family = family_of(router)
    if family is None or family.weight is None:
        return None
    try:
        weight = attrgetter(family.weight)(router)
    except AttributeError:  # a router with more than one matrix
        return None
    return None if weight.is_meta or weight.ndim != 2 else weight


def computes_single(router: nn.Module) -> bool:
    """Whether the router's logits are float32 even where weights and inputs are bf16.

    Found out by running a copy of it in bf16 on one token; a router that needs more than its input
    is taken to compute in the precision it is given.
    """
    matrix, taken = logits_matrix(router), inspect.signature(router.forward).parameters.values()
    needed = [x for x in taken if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    if matrix is None or len(needed) != 1:
        return False
    with torch.inference_mode(False), torch.no_grad():
        trial = copy.deepcopy(router).to(torch.bfloat16)
        trial._forward_hooks.clear()
        trial._forward_pre_hooks.clear()
        token = torch.zeros(1, matrix.shape[1], dtype=torch.bfloat16, device=matrix.device)
        output = trial(token)
    return output[0].dtype == torch.float32


def position_tables(model: nn.Module) -> list[nn.Module]:
    """Modules that hold numbers but no parameters: rotary tables, in float32 in every model."""
    return [
        module
        for module in model.modules()
        if not any(True for _ in module.parameters())
        and any(buffer.is_floating_point() for buffer in module.buffers())
    ]


def kept_names(routers: Collection[str], keep: Collection[str]) -> frozenset[str]:
    """The routers to leave alone, refused if the model has none of that name."""
    unknown = sorted(set(keep) - set(routers))
    require(not unknown, f"no routers named {unknown} to keep; the model has {list(routers)}")
    return frozenset(keep)
