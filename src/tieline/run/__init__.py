"""Running a model: what is run, how, and what looks at it."""
