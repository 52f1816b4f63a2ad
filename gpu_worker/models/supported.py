"""The table of supported models: every `model_type` that is tested, by the decoder that runs it."""

from gpu_worker.models.config import LLAMA_LIKE
from gpu_worker.models.gpt_families import FAMILIES

OWN_DECODERS: dict[str, str] = {**dict.fromkeys(LLAMA_LIKE, "llama"), **dict.fromkeys(FAMILIES, "gpt")}
THROUGH_TRANSFORMERS = ("opt", "gemma2", "gemma3_text", "gpt_neox", "phi", "gpt_oss")
