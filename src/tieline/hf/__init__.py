"""Hugging Face models: family facts and capture of their routing."""
