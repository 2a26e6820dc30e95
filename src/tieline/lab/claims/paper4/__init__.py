"""Claims of paper 4: sigmoid against softmax attention as mixtures of experts."""

MODULES = ["definitions", "bounds_and_rates", "split_rates"]
"""Files of this package that hold claims."""
