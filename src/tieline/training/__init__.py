"""Controllers with running state, schedules and recipes for training."""
