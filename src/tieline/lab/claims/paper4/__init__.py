"""Claims of paper 4: sigmoid against softmax attention as mixtures of experts."""

MODULES = ["definitions", "theorems", "split_rates"]
"""Files of this package that hold claims."""
