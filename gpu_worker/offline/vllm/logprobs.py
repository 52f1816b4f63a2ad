"""vLLM's name of the module that has log probabilities."""

from gpu_worker.offline.outputs import Logprob

__all__ = ["Logprob"]
