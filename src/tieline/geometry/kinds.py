"""Kinds of arguments that several modules share."""

__all__ = ["Real"]

Real = float | int
"""A number; run-time checks take `float` literally and would refuse a plain 1."""
