"""Prompts as vectors: what a caller may ask of them, what a model's files say, and how they are compared."""
