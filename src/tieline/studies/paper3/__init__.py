"""Claims of paper 3: tropical geometry of mixtures of experts."""

__all__ = ["MODULES"]

MODULES = [
    "linear",
    "algebra",
    "routing",
    "arrangements",
    "capacity",
    "reachability",
    "tightness",
    "manifolds",
    "granularity",
    "centring",
]
"""Files of this package that hold claims."""
