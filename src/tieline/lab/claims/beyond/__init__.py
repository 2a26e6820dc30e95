"""Claims that no paper makes: what this project adds, tested as the papers' claims are."""

MODULES = ["continuous_gates", "estimation_laws", "flips", "router_laws"]
"""Files of this package that hold claims."""
