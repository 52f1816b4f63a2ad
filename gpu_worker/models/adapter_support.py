"""Says from the headers of a model's files which low-rank adapters the model takes, before anybody loads it."""

from pathlib import Path

from gpu_worker.models import generation_config
from gpu_worker.models.decoders.config import LlamaConfig, is_llama_like, is_mixture
from gpu_worker.models.decoders.gpt_families import is_gpt_like
from gpu_worker.models.decoders.lora_weights import support_of
from gpu_worker.models.gguf.header import architecture
from gpu_worker.models.gguf.sources import source_of
from gpu_worker.models.model_kind import TEXT_PARTS, refuse_unservable
from gpu_worker.models.text_part import text_config
from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_parts import first_parts
from octavo.model_files.gguf_support import runs_through_transformers
from octavo.model_files.lora_support import NO_LORA, LoraSupport


def support_in(path: Path) -> LoraSupport:
    """Of a folder or a GGUF file. Raises BadModel, also for a model that no worker serves, or MalformedGguf."""
    if path.is_dir() and (path / "config.json").exists():
        content = generation_config.read_object(path / "config.json")
        if content.get("model_type") in TEXT_PARTS:
            content = text_config(path.name, content, has_head=False)
        refuse_unservable(path.name, content)
        runs = is_llama_like(content) or is_mixture(content)
        return support_of(LlamaConfig.from_dict(content)) if runs else NO_LORA
    if path.is_dir():
        (path,) = first_parts(sorted(path.glob("*.gguf")))
    with GgufFile(path) as file:
        architecture(file)
        if runs_through_transformers(file):
            return NO_LORA
        content = source_of(file)[0]
        return NO_LORA if is_gpt_like(content) else support_of(LlamaConfig.from_dict(content))
