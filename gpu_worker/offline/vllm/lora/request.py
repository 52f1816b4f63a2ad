"""vLLM's name of the module that has LoRARequest."""

from gpu_worker.offline.lora_request import LoRARequest

__all__ = ["LoRARequest"]
