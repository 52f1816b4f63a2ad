"""vLLM's name of the module that has LLMEngine."""

from gpu_worker.offline.live.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
