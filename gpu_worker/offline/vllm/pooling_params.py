"""vLLM's name of the module that has PoolingParams."""

from gpu_worker.offline.pooling.outputs import OfflinePoolingParams as PoolingParams

__all__ = ["PoolingParams"]
