"""Controllers with running state, schedules, recipes and the engine that runs them."""
