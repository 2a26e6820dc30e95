"""Claims of paper 2: estimation with cosine and perturbed cosine routers."""

MODULES = ["definitions", "bounds_and_rates", "minimax", "tables"]
"""Files of this package that hold claims."""
