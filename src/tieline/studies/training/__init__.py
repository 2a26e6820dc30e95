"""Studies of trained models: what the papers' experiments show at the scale of this machine."""
