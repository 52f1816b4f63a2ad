"""Prompts as vectors: sequences without output, and what becomes of the hidden states that they end with."""
