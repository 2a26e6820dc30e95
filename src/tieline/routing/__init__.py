"""Routers, gates, experts, dispatch and the layer that composes them."""

from tieline.routing.attention import SelfAttention, sigmoid_attention, softmax_attention
from tieline.routing.attention_moe import attention_as_moe
from tieline.routing.baselines import BASELINES, Smear, SoftMoE, baseline
from tieline.routing.dispatch import dispatch
from tieline.routing.experts import Experts
from tieline.routing.gates import (
    ExpertChoice,
    Gate,
    Groups,
    GShardTopK,
    Hard,
    Law,
    ReLUGate,
    SelectiveGate,
    Sigmoid,
    Softmax,
    TopK,
)
from tieline.routing.layer import MoE, Routing, SharedExpert, moe
from tieline.routing.losses import (
    LayerRouting,
    auxiliary_loss,
    balance_loss,
    boundary_loss,
    collect_routing,
    router_z_loss,
    sparsity_loss,
)
from tieline.routing.routers import CosineRouter, LinearRouter, QuadraticRouter, Router
from tieline.routing.smooth import SmoothTopK, smoothstep

__all__ = [
    "BASELINES",
    "CosineRouter",
    "ExpertChoice",
    "Experts",
    "GShardTopK",
    "Gate",
    "Groups",
    "Hard",
    "Law",
    "LayerRouting",
    "LinearRouter",
    "MoE",
    "QuadraticRouter",
    "ReLUGate",
    "Router",
    "Routing",
    "SelectiveGate",
    "SelfAttention",
    "SharedExpert",
    "Sigmoid",
    "Smear",
    "SmoothTopK",
    "SoftMoE",
    "Softmax",
    "TopK",
    "attention_as_moe",
    "auxiliary_loss",
    "balance_loss",
    "baseline",
    "boundary_loss",
    "collect_routing",
    "dispatch",
    "moe",
    "router_z_loss",
    "sigmoid_attention",
    "smoothstep",
    "softmax_attention",
    "sparsity_loss",
]
