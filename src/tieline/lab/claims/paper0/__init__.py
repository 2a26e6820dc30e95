"""Claims of paper 0: boundary mass and the soft-to-hard limit."""

MODULES = [
    "boundary_mass",
    "soft_to_hard_limit",
    "landscape",
    "teacher_recovery",
    "symmetry_breaking",
]
"""Files of this package that hold claims."""
