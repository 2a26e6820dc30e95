"""Claims of paper 0: boundary mass and the soft-to-hard limit."""

MODULES = ["model", "coarea", "limit", "landscape", "assumptions", "breaking"]
"""Files of this package that hold claims."""
