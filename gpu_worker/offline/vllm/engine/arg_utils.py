"""vLLM's name of the module that has EngineArgs."""

from gpu_worker.offline.live.new_requests import EngineArgs
from gpu_worker.offline.live.new_requests import EngineArgs as AsyncEngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
