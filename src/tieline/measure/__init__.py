"""What the instrument measures on a trace: gaps, boundary mass, flips, rounding, load."""
