"""vLLM's name of the module that has AsyncLLM."""

from gpu_worker.offline.live.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
