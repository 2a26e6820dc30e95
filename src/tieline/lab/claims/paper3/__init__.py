"""Claims of paper 3: tropical geometry of mixtures of experts."""

MODULES = ["algebra", "arrangements", "tightness", "manifolds", "splitting_and_centring"]
"""Files of this package that hold claims."""
