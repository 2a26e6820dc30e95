"""Claims of this project beyond the papers, tested in the same way."""

MODULES = ["continuous_gates", "estimation_laws", "flips", "router_laws"]
"""Files of this package that hold claims."""
