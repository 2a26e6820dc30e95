"""Claims of paper 1: discontinuities of sparse mixtures of experts."""

MODULES = ["ties", "tubes", "diffusion", "smoothing", "tables"]
"""Files of this package that hold claims."""
