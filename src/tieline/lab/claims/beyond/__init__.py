"""Claims that no paper makes: what this project adds, tested as the papers' claims are."""

MODULES = ("continuity", "layers", "symmetries", "contact", "levels", "models", "structured")
"""Files of this package that hold claims."""
