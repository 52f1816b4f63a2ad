"""Engines whose requests come and go while others run, by vLLM's names: `LLMEngine` and `AsyncLLM`."""
