"""A paper's question asked of a user's model."""
