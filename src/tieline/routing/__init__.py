"""Routers, gates, experts, dispatch and the layer that composes them."""

from tieline.routing.attention import sigmoid_attention, softmax_attention
from tieline.routing.attention_moe import attention_as_moe
from tieline.routing.baselines import BASELINES, baseline
from tieline.routing.batchwise import ExpertChoice, GShardTopK
from tieline.routing.collect import LayerRouting, auxiliary_loss, collect_routing
from tieline.routing.dispatch import dispatch
from tieline.routing.experts import Experts
from tieline.routing.gates import Gate, Hard, Law, ReLUGate, Sigmoid, Softmax
from tieline.routing.layer import MoE, Routing, SharedExpert, moe
from tieline.routing.losses import balance_loss, boundary_loss, router_z_loss, sparsity_loss
from tieline.routing.routers import CosineRouter, LinearRouter, QuadraticRouter, Router
from tieline.routing.selective import Groups, SelectiveGate, TopK
from tieline.routing.self_attention import SelfAttention
from tieline.routing.smear import Smear
from tieline.routing.smooth import SmoothTopK, smoothstep
from tieline.routing.soft_moe import SoftMoE

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
