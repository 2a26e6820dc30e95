"""Claims of paper 1: discontinuities of sparse mixtures of experts."""

__all__ = ["MODULES"]

MODULES: list[str] = []
"""Files of this package that hold claims."""
