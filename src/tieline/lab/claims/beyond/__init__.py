"""Claims that no paper makes: what this project adds, tested as the papers' claims are."""

MODULES = ["continuity", "estimation", "flips", "heads", "levels", "models"]
"""Files of this package that hold claims."""
