"""Claims of paper 2: estimation with cosine and perturbed cosine routers."""

__all__ = ["MODULES"]

MODULES = ["definitions", "theorems", "tables"]
"""Files of this package that hold claims."""
