"""Makes the model in the box: `python -m tools.demo_model`."""
