"""Makes the model in the box: `python -m tools.shipped_model`."""
