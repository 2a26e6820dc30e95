"""The layers that papers 1 and 2 compare with, by name.

    expert_choice   experts choose tokens                          `ExpertChoice`
    gshard          top-k with gate noise and capacity             `GShardTopK`
    remoe           ReLU gate; its L1 loss by `SparsityController`  `ReLUGate`
    soft_moe        slots that mix tokens                          `SoftMoE`
    smear           experts whose parameters are averaged          `Smear`

`remoe` alone treats a token alike alone and in a batch.
"""

from typing import Any, Literal

from torch import nn

from tieline.errors import require
from tieline.routing.experts import Experts
from tieline.routing.layer import ROUTERS, moe
from tieline.routing.smear import Smear
from tieline.routing.soft_moe import SoftMoE

__all__ = ["BASELINES", "baseline"]

BASELINES = ("expert_choice", "gshard", "remoe", "smear", "soft_moe")
"""The names."""


def baseline(
    name: str,
    *,
    d_model: int,
    n_experts: int,
    k: int,
    d_hidden: int,
    router: str = "linear",
    activation: Literal["swiglu", "geglu", "relu", "gelu"] = "swiglu",
    bias: bool = False,
    router_options: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """A layer x (..., T, D) → y (..., T, D) of one of the `BASELINES`.

    Args:
        name: a name in `BASELINES`.
        d_model: width D of a token.
        n_experts: number of experts E.
        k: experts per token, on average where the layer does not fix it; SMEAR and Soft MoE do not
            use it.
        d_hidden: width H of an expert.
        router: a key of `ROUTERS`; Soft MoE has its own.
        activation: activation of the experts.
        bias: whether the experts have biases.
        router_options: further arguments of the router.
        options: further arguments of gate or layer, such as `{"capacity_factor": 1.25}`,
            `{"slots": 2}` or `{"temperature": 0.5}`.
    """
    require(name in BASELINES, f"{name=} is not one of {list(BASELINES)}")
    require(router in ROUTERS, f"{router=} is not one of {sorted(ROUTERS)}")
    options, router_options = options or {}, router_options or {}
    if name in ("soft_moe", "smear"):
        experts = Experts(n_experts, d_model, d_hidden, activation=activation, bias=bias)
        if name == "soft_moe":
            return SoftMoE(experts, **options)
        return Smear(ROUTERS[router](d_model, n_experts, **router_options), experts, **options)
    return moe(
        d_model=d_model,
        n_experts=n_experts,
        k=k,
        d_hidden=d_hidden,
        router=router,
        gate="relu" if name == "remoe" else name,
        activation=activation,
        bias=bias,
        router_options=router_options,
        gate_options=options,
    )
