"""`LLM.embed` and `LLM.score`: prompts as vectors, and texts compared."""
