"""Every gate and router of the package in every variant that the laws are tested on."""

import torch

from tieline import (
    CosineRouter,
    Groups,
    Hard,
    LinearRouter,
    ProjectedTopK,
    QuadraticRouter,
    ReLUGate,
    Sigmoid,
    SmoothTopK,
    Softmax,
    TopK,
)
from tieline.lab.limits.continuity_cost import LaplaceTopK

EXPERTS = 8
BIAS = torch.tensor([0.25, -0.5, 0.0, 0.125, -0.25, 0.5, 0.0, -0.125], dtype=torch.float64)

TOPK_VARIANTS = {
    "mixtral": {},
    "olmoe": {"renormalize": False},
    "gpt-oss": {"order": "after"},
    "sigmoid": {"scoring": "sigmoid"},
    "sigmoid+bias": {"scoring": "sigmoid", "selection_bias": BIAS / 8},
    "sigmoid+bias, raw": {
        "scoring": "sigmoid",
        "selection_bias": BIAS / 8,
        "renormalize": False,
    },
    "logits+bias": {"order": "after", "selection_bias": BIAS},
    "softmax+bias": {"selection_bias": BIAS / 8, "renormalize": False},
    "groups max": {"groups": Groups(4, 2, "max")},
    "groups top2sum": {"groups": Groups(4, 2, "top2sum")},
    "deepseek-v3": {
        "scoring": "sigmoid",
        "selection_bias": BIAS / 8,
        "groups": Groups(4, 2),
        "scale": 2.5,
    },
}


def smooth(name, epsilon=0.4, k=3, **options):
    """SmoothTopK of a variant with its exact gradient."""
    return SmoothTopK(k, epsilon=epsilon, detach_ramp=False, **TOPK_VARIANTS[name], **options)


def projected(name, epsilon=0.4, k=3, **options):
    """ProjectedTopK of a variant with its exact gradient."""
    return ProjectedTopK(k, epsilon=epsilon, detach_ramp=False, **TOPK_VARIANTS[name], **options)


def all_gates():
    """A fresh gate of each kind, by name."""
    gates = {"softmax": Softmax(0.5), "hard": Hard(), "sigmoid": Sigmoid(), "relu": ReLUGate()}
    for name, options in TOPK_VARIANTS.items():
        gates[f"topk {name}"] = TopK(3, **options)
        gates[f"smooth {name}"] = smooth(name)
        gates[f"projected {name}"] = projected(name)
    gates["smooth learnable"] = SmoothTopK(3, detach_ramp=False)
    gates["projected learnable"] = ProjectedTopK(3, detach_ramp=False)
    gates["laplace"] = LaplaceTopK(3, epsilon=0.2, detach_ramp=False)
    gates["smooth b=50"] = smooth("mixtral", b=50.0)
    gates["smooth k_max"] = smooth("mixtral", epsilon=2.0, k_max=4)
    gates["topk all"] = TopK(EXPERTS)
    gates["smooth all"] = SmoothTopK(EXPERTS, epsilon=0.5, detach_ramp=False)
    return gates


def all_routers(d_model=5, n_experts=EXPERTS):
    """A fresh router of each kind, by name."""
    return {
        "linear": LinearRouter(d_model, n_experts),
        "linear+bias": LinearRouter(d_model, n_experts, bias=True),
        "cosine": CosineRouter(d_model, n_experts),
        "perturbed cosine": CosineRouter(d_model, n_experts, tau=(0.1, 0.2)),
        "projected cosine": CosineRouter(d_model, n_experts, d_proj=3, temperature=0.3),
        "quadratic": QuadraticRouter(d_model, n_experts),
        "partial quadratic": QuadraticRouter(d_model, n_experts, kind="partial"),
        "low-rank quadratic": QuadraticRouter(d_model, n_experts, rank=2),
    }
