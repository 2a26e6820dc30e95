"""Claims of paper 1: discontinuities of sparse mixtures of experts."""

__all__ = ["MODULES"]

MODULES = [
    "ties",
    "tubes",
    "orders",
    "bands",
    "diffusion",
    "occupation",
    "smoothing",
    "budget",
    "experiments",
]
"""Files of this package that hold claims."""
