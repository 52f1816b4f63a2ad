"""Models that read pictures: their text on our decoder where the extension computes it, else by Transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpu_worker.models.checkpoint.weights import SafetensorsSource
from gpu_worker.models.decoders.config import LlamaConfig, is_llama_like
from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.models.loading.load_options import LoadOptions
from gpu_worker.models.loading.own_decoders import native
from gpu_worker.models.loading.packed_files import PackedFiles
from gpu_worker.models.text_part import HEAD, TextSource, text_config
from octavo.model_files.lora_support import NO_LORA
from octavo.model_files.quantization import PICTURED


def picture_decoder(
    name: str, path: Path, content: Mapping[str, Any], dtype: torch.dtype, how: LoadOptions, kept: PackedFiles
) -> Decoder:
    """The decoder of a directory whose config.json is `content`, of one of model_kind.PICTURES."""
    if content["model_type"] in PICTURED and how.place is None:
        source = TextSource(SafetensorsSource(path))
        text = text_config(name, content, has_head=f"{HEAD}weight" in source.names())
        text = as_text(text, content["model_type"])
        config = LlamaConfig.from_dict(text).limited_to(how.context_tokens) if is_llama_like(text) else None
        if config is not None and config.rope.mrope_section and how.native(config):
            decoder = native(source, config, dtype, how, kept)
            decoder.load_lora, decoder.lora_support = None, NO_LORA
            from gpu_worker.models.through_transformers.pictures.encoder import load_encoder  # seconds of imports

            decoder.encode_picture, patches = load_encoder(path, content, dtype, how.ops, config.hidden_size)
            decoder.picture_support = patches.support
            return decoder
    how.native(None)
    from gpu_worker.models.through_transformers.pictures.decoder import PictureDecoder

    return PictureDecoder.load_with_pictures(path, content, dtype, how.ops, how.device)


def as_text(text: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The configuration of the text of a model of this kind, as one without pictures has it."""
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    rope["mrope_interleaved"] = kind == "qwen3_vl"  # whatever the file says, as in Transformers
    return {**text, "model_type": PICTURED[kind], "rope_parameters": rope}
