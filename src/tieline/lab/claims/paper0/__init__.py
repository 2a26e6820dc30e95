"""Claims of paper 0: boundary mass and the soft-to-hard limit."""

MODULES = ["boundary_mass", "limit", "landscape", "teacher_recovery", "breaking"]
"""Files of this package that hold claims."""
