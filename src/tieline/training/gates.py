"""The nine ways to route that are trained side by side.

smoe        linear router, hard top-2: the baseline
top3        hard top-3: the control for "is it only the extra expert?" (paper 1, Table 8)
smooth50    smooth top-2, b = 50, k* = 2.5: the paper's SmoothSMoE
smooth1     the same with b = 1: a ramp as wide as the band
annealed    smooth50 with k* brought down to 2, scored with hard top-2 (paper 1, section 7.5)
remoe       ReLU gate driven to 2 experts by an adaptive L1 loss, dense at the start
cosine      cosine router with a projection, hard top-2 (paper 2, section 5.2)
perturbed   the same with τ1 = τ2 = 0.1 added to the norms
sigmoid     linear router, top-2 by sigmoid scores, renormalised
"""

from typing import Any

from tieline.errors import require
from tieline.training.config import GateConfig

__all__ = ["GATE_NAMES", "gate_config"]

COSINE = {"d_proj": 8, "temperature": 0.1}
"""Width half the number of experts, as paper 2, E.2; the temperature lets cosines decide."""

VARIANTS: dict[str, dict[str, Any]] = {
    "smoe": {},
    "top3": {"extra": 1},
    "smooth50": {"gate": "smooth", "gate_options": {"b": 50.0}},
    "smooth1": {"gate": "smooth", "gate_options": {"b": 1.0}},
    "annealed": {
        "gate": "smooth",
        "gate_options": {"b": 50.0},
        "anneal": (0.5, 0.75),
        "evaluate_hard": True,
    },
    "remoe": {"gate": "relu", "dense_share": 0.025},
    "cosine": {"router": "cosine", "router_options": COSINE},
    "perturbed": {"router": "cosine", "router_options": {**COSINE, "tau": (0.1, 0.1)}},
    "sigmoid": {"gate_options": {"scoring": "sigmoid"}},
}
GATE_NAMES = tuple(VARIANTS)


def gate_config(name: str, k: int = 2) -> GateConfig:
    """The variant `name` for `k` experts per token; smooth gates aim at k* = k + 0.5."""
    require(name in VARIANTS, f"the gate {name!r} is not one of {list(GATE_NAMES)}")
    fields = dict(VARIANTS[name])
    return GateConfig(name=name, k=k + fields.pop("extra", 0), **fields)
