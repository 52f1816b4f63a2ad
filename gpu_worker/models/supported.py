"""The table of supported models: every `model_type` that is tested, by the decoder that runs it."""

from gpu_worker.models.decoders.config import LLAMA_LIKE
from gpu_worker.models.decoders.gpt_families import FAMILIES

OWN_DECODERS: dict[str, str] = {**dict.fromkeys(LLAMA_LIKE, "llama"), **dict.fromkeys(FAMILIES, "gpt")}
THROUGH_TRANSFORMERS = (
    *("afmoe", "apertus", "arcee", "biogpt", "cohere", "cohere2", "cwm", "ernie4_5", "ernie4_5_moe", "exaone4"),
    *("flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_bigcode", "gpt_neox"),
    *("gpt_oss", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("jetmoe", "ministral", "ministral3", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt"),
    *("persimmon", "phi", "phimoe", "qwen2_moe", "qwen3_moe", "seed_oss", "stablelm", "starcoder2", "vaultgemma"),
)
