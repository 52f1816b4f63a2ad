"""The worker: owns the blocks of the paged KV cache and the step loop. Imports nothing of `router`.

Offline use: `from gpu_worker import LLM, SamplingParams`. Names are looked up when they are used, so that importing the
package imports neither torch nor a tokenizer.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_worker.offline.live.async_llm import AsyncLLM
    from gpu_worker.offline.live.async_llm import AsyncLLM as AsyncLLMEngine
    from gpu_worker.offline.live.llm_engine import LLMEngine
    from gpu_worker.offline.live.new_requests import EngineArgs
    from gpu_worker.offline.live.new_requests import EngineArgs as AsyncEngineArgs
    from gpu_worker.offline.llm import LLM
    from gpu_worker.offline.lora_request import LoRARequest
    from gpu_worker.offline.outputs import (
        BeamSearchOutput,
        CompletionOutput,
        Logprob,
        RequestOutput,
        RequestOutputKind,
    )
    from gpu_worker.offline.params import BeamSearchParams
    from gpu_worker.offline.params import OfflineParams as SamplingParams
    from gpu_worker.offline.pooling.outputs import EmbeddingOutput, EmbeddingRequestOutput, ScoringRequestOutput
    from gpu_worker.offline.pooling.outputs import OfflinePoolingParams as PoolingParams
    from gpu_worker.offline.prompts import TextPrompt, TokensPrompt
    from gpu_worker.offline.structured import StructuredOutputsParams

# gpu_worker.sampling_params, .inputs, .v1.engine.async_llm and others, which programs written for vLLM import.
__path__.append(str(Path(__file__).with_name("offline") / "vllm"))

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_HOMES = {
    "LLM": ("llm", "LLM"),
    "AsyncEngineArgs": ("live.new_requests", "EngineArgs"),
    "AsyncLLM": ("live.async_llm", "AsyncLLM"),
    "AsyncLLMEngine": ("live.async_llm", "AsyncLLM"),
    "BeamSearchOutput": ("outputs", "BeamSearchOutput"),
    "BeamSearchParams": ("params", "BeamSearchParams"),
    "CompletionOutput": ("outputs", "CompletionOutput"),
    "EmbeddingOutput": ("pooling.outputs", "EmbeddingOutput"),
    "EmbeddingRequestOutput": ("pooling.outputs", "EmbeddingRequestOutput"),
    "EngineArgs": ("live.new_requests", "EngineArgs"),
    "LLMEngine": ("live.llm_engine", "LLMEngine"),
    "LoRARequest": ("lora_request", "LoRARequest"),
    "Logprob": ("outputs", "Logprob"),
    "PoolingParams": ("pooling.outputs", "OfflinePoolingParams"),
    "ScoringRequestOutput": ("pooling.outputs", "ScoringRequestOutput"),
    "RequestOutput": ("outputs", "RequestOutput"),
    "RequestOutputKind": ("outputs", "RequestOutputKind"),
    "SamplingParams": ("params", "OfflineParams"),
    "StructuredOutputsParams": ("structured", "StructuredOutputsParams"),
    "TextPrompt": ("prompts", "TextPrompt"),
    "TokensPrompt": ("prompts", "TokensPrompt"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own_name = _HOMES[name]
    return getattr(import_module(f"gpu_worker.offline.{module}"), own_name)
