"""vLLM's name of the module that has what LLM returns."""

from gpu_worker.offline.outputs import CompletionOutput, RequestOutput
from gpu_worker.offline.pooling.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]
