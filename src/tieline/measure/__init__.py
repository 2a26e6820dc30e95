"""Measures of a routing trace: gaps, boundary mass, flips, rounding, load."""
