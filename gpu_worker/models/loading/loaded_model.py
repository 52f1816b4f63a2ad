"""What comes of loading a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gpu_worker.models.decoders.decoder import Decoder
from octavo.pooling.params import ModelPooling


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    name: str
    decoder: Decoder
    dtype: torch.dtype
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    tokenizer: str  # see RunnerInfo
    sampling_defaults: Mapping[str, float]  # see RunnerInfo
    pooling: ModelPooling = field(default_factory=ModelPooling)
