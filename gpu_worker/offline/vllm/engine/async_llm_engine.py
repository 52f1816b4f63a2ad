"""vLLM's name of the module that has AsyncLLMEngine."""

from gpu_worker.offline.live.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
