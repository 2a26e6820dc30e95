"""Noise in the routing path: Gaussian, on the routers' logits or on the hidden states.

score_noise   N(0, σ²) on every logit of every router
state_noise   N(0, (ρ · rms(x))²) on every coordinate of a hidden state x: of the routers' inputs
              alone, or of what every routed decoder layer hands on
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tieline.errors import UnsupportedModelError, require
from tieline.hf.router_scope import RouterScope, logits_matrix, modular_routers

__all__ = ["score_noise", "state_noise"]


@contextmanager
def score_noise(model: nn.Module, sigma: float, generator: torch.Generator) -> Iterator[None]:
    """Inside the block, every router's logits have independent N(0, σ²) noise.

    Args:
        model: a model whose routers make their logits by one product, or such a router.
        sigma: standard deviation, in units of the logits.
        generator: where the noise comes from, on the CPU.
    """
    require(sigma >= 0, f"noise must be >= 0, got sigma={sigma}")
    routers = modular_routers(model)
    for name, router in routers.items():
        require(
            logits_matrix(router) is not None,
            f"layer {name!r}: the logits of {type(router).__name__} are not one product",
            UnsupportedModelError,
        )
    scope = RouterScope(routers)
    with scope.watching(), _NoisyLogits(scope, sigma, generator):
        yield


@contextmanager
def state_noise(
    model: nn.Module,
    ratio: float,
    generator: torch.Generator,
    parts: Literal["router", "all"] = "router",
) -> Iterator[None]:
    """Inside the block, hidden states have noise of `ratio` times their root mean square.

    Args:
        model: a Mixture-of-Experts model, or one of its routers.
        ratio: ρ.
        generator: where the noise comes from, on the CPU.
        parts: "router" for the routers' inputs alone, "all" for the output of every decoder layer
            that has a router.
    """
    require(ratio >= 0, f"noise must be >= 0, got ratio={ratio}")
    require(parts in ("router", "all"), f"parts: router or all, got {parts!r}")
    handles = []
    for name, router in modular_routers(model).items():
        if parts == "router":
            handles.append(router.register_forward_pre_hook(_before(ratio, generator)))
        else:
            layer = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
            handles.append(layer.register_forward_hook(_after(ratio, generator)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _NoisyLogits(TorchFunctionMode):
    """Adds noise to what the product inside a router gives."""

    def __init__(self, scope: RouterScope, sigma: float, generator: torch.Generator) -> None:
        super().__init__()
        self._scope, self._sigma, self._generator = scope, sigma, generator

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and self._scope.running is not None:
            return result + self._sigma * _normal(result, self._generator)
        return result


def _before(ratio: float, generator: torch.Generator) -> Any:
    def noisy_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _noisy(args[0], ratio, generator), *args[1:]

    return noisy_input


def _after(ratio: float, generator: torch.Generator) -> Any:
    def noisy_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return _noisy(output, ratio, generator)
        return _noisy(output[0], ratio, generator), *output[1:]

    return noisy_output


def _noisy(states: Tensor, ratio: float, generator: torch.Generator) -> Tensor:
    size = states.square().mean(dim=-1, keepdim=True).sqrt()
    return states + ratio * size * _normal(states, generator)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like)
