"""Tieline measures, explains and removes the routing ties of Mixture-of-Experts models."""

from tieline._version import __version__
from tieline.core.errors import TielineError
from tieline.core.ranking import gap, stable_topk
from tieline.routing import (
    CosineRouter,
    Experts,
    Groups,
    Hard,
    LinearRouter,
    MoE,
    QuadraticRouter,
    ReLUGate,
    Sigmoid,
    SmoothTopK,
    Softmax,
    TopK,
    auxiliary_loss,
    collect_routing,
    moe,
)

__all__ = [
    "CosineRouter",
    "Experts",
    "Groups",
    "Hard",
    "LinearRouter",
    "MoE",
    "QuadraticRouter",
    "ReLUGate",
    "Sigmoid",
    "SmoothTopK",
    "Softmax",
    "TielineError",
    "TopK",
    "__version__",
    "auxiliary_loss",
    "collect_routing",
    "gap",
    "moe",
    "stable_topk",
]
