"""vLLM's name of the folder that has its engine."""
