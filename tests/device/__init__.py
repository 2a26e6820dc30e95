"""A pretended accelerator, and what runs on it."""
