"""Claims that no paper makes: what this project adds, tested as the papers' claims are."""

MODULES = [
    "continuous_gates",
    "cooling",
    "estimation_laws",
    "flips",
    "heads",
    "levels",
    "router_laws",
]
"""Files of this package that hold claims."""
