"""vLLM's name of the module that has LLM."""

from gpu_worker.offline.llm import LLM

__all__ = ["LLM"]
