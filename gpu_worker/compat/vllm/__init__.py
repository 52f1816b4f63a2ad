"""vLLM's operations."""
