"""Claims of paper 0: boundary mass and the soft-to-hard limit."""

__all__ = ["MODULES"]

MODULES: list[str] = []
"""Files of this package that hold claims."""
