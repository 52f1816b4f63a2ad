"""vLLM's name of the module that has the parameters of a request."""

from gpu_worker.offline.outputs import RequestOutputKind
from gpu_worker.offline.params import BeamSearchParams
from gpu_worker.offline.params import OfflineParams as SamplingParams
from gpu_worker.offline.structured import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
