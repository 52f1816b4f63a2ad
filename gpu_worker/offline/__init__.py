"""`LLM`: prompts in, outputs out, in the caller's process, without a service."""
