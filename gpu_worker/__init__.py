"""The worker: owns the blocks of the paged KV cache and the step loop. Imports nothing of `router`.

Offline use: `from gpu_worker import LLM, SamplingParams`. Names are looked up when they are used, so that importing the
package imports neither torch nor a tokenizer.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_worker.offline.llm import LLM
    from gpu_worker.offline.offline_request import CompletionOutput, RequestOutput
    from octavo.sampling import FinishReason, SamplingParams

__all__ = ["LLM", "CompletionOutput", "FinishReason", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "gpu_worker.offline.llm",
    "CompletionOutput": "gpu_worker.offline.offline_request",
    "RequestOutput": "gpu_worker.offline.offline_request",
    "SamplingParams": "octavo.sampling",
    "FinishReason": "octavo.sampling",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
