"""vLLM's name of the module that has what LLM returns."""

from gpu_worker.offline.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
