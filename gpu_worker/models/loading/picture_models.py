"""Models that read pictures: their text on our decoder where the extension computes it, else by Transformers."""

import logging
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
from octavo.model_files.lora_support import LoraSupport
from octavo.model_files.quantization import PICTURED
from octavo.request.errors import BadModel

log = logging.getLogger(__name__)
NO_ADAPTERS = "adapters of models that read pictures are not read: use a model of text"
# As in Transformers.
USUAL_SECTIONS = {"qwen2_5_vl": (16, 24, 24), "qwen2_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20)}


def picture_decoder(
    name: str, path: Path, content: Mapping[str, Any], dtype: torch.dtype, how: LoadOptions, kept: PackedFiles
) -> Decoder:
    """The decoder of a directory whose config.json is `content`, of one of model_kind.PICTURES."""
    kind = content["model_type"]
    if kind in PICTURED and how.place is None:
        source = TextSource(SafetensorsSource(path))
        text = as_text(text_config(name, content, has_head=f"{HEAD}weight" in source.names()), kind)
        config = LlamaConfig.from_dict(text).limited_to(how.context_tokens) if is_llama_like(text) else None
        if config is not None and how.native(config):
            # Seconds of imports that others do not need.
            from gpu_worker.models.through_transformers.pictures.encoder import ENCODER_NAMES, load_encoder

            config.rope.axes()  # refused before minutes of packing
            encoder, patches = load_encoder(path, content, dtype, how.ops, config.hidden_size)
            if left := sorted(each for each in source.left_out if not ENCODER_NAMES.fullmatch(each)):
                raise BadModel(f"{len(left)} weights the model has no place for: {', '.join(left[:5])}")
            if encoder.num_states - 1 > config.num_layers:
                layers = f"the text's {config.num_layers} layers"
                raise BadModel(f"config.json: deepstack_visual_indexes are more than {layers}")
            decoder = native(source, config, dtype, how, kept)
            decoder.load_lora, decoder.lora_support = None, LoraSupport(refusal=NO_ADAPTERS)
            decoder.encode_picture, decoder.picture_support = encoder, patches.support
            return decoder
        log.info("the text of %s is not what octavo's own decoders compute: it runs through Transformers", name)
    how.native(None)
    from gpu_worker.models.through_transformers.pictures.decoder import PictureDecoder

    return PictureDecoder.load_with_pictures(path, content, dtype, how.ops, how.device)


def as_text(text: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The configuration of the text of a model of this kind, as one without pictures has it."""
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    rope["mrope_interleaved"] = kind == "qwen3_vl"  # whatever the file says, as in Transformers
    rope.setdefault("mrope_section", USUAL_SECTIONS[kind])
    return {**text, "model_type": PICTURED[kind], "rope_parameters": rope}
