"""Opens a directory: its configuration, the form of its weights, and the decoder that computes them."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_worker.models import generation_config
from gpu_worker.models.checkpoint.bare_names import PrefixedSource, is_bare
from gpu_worker.models.checkpoint.kv_scales import KvScaledSource, read_scales
from gpu_worker.models.checkpoint.quantized import decoded, open_source
from gpu_worker.models.checkpoint.weights import CheckpointReader, SafetensorsSource, WeightSource, weight_files
from gpu_worker.models.decoders import llama
from gpu_worker.models.decoders.config import LlamaConfig, is_llama_like, is_mixture
from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.models.decoders.gpt_families import is_gpt_like
from gpu_worker.models.decoders.latent.latent_config import FAMILIES as LATENT
from gpu_worker.models.decoders.latent.latent_source import in_halves
from gpu_worker.models.fingerprint import CONTENT_FILES, PICTURE_FILES, model_fingerprint
from gpu_worker.models.loading.load_options import LoadOptions
from gpu_worker.models.loading.loaded_model import LoadedModel
from gpu_worker.models.loading.own_decoders import gpt_decoder, kept, native, op_by_op
from gpu_worker.models.loading.packed_files import PackedFiles
from gpu_worker.models.loading.picture_models import picture_decoder
from gpu_worker.models.loading.transformers_models import encoder_decoder, of_tensors
from gpu_worker.models.model_kind import TEXT_PARTS, THROUGH_TRANSFORMERS, has_encoder, refuse_unservable
from gpu_worker.models.pooling_files import read_pooling
from gpu_worker.models.text_part import HEAD, TextSource, text_config
from gpu_worker.models.tokenizer_conversion import find_tokenizer
from octavo.model_files.lora_support import LoraSupport
from octavo.model_files.quantization import PICTURES, has_integers, is_mxfp4, rounds_inputs
from octavo.request.errors import BadModel

log = logging.getLogger(__name__)
DECIDING_FILES = ("config.json", "model.safetensors.index.json")  # beside the weights, of what is packed and how


def load_directory(name: str, path: Path, how: LoadOptions) -> LoadedModel:
    content = generation_config.read_object(path / "config.json")
    text: TextSource | None = None
    if content.get("model_type") in TEXT_PARTS:
        log.info("%s reads more than text (%s): its text alone is served", name, content["model_type"])
        text = TextSource(SafetensorsSource(path))
        content = text_config(name, content, has_head=f"{HEAD}weight" in text.names())
    refuse_unservable(name, content)
    files, source = weight_files(path), text or SafetensorsSource(path)
    dtype = how.dtype or (torch.float32 if how.device.type == "cpu" else _stored_dtype(content))
    generation = generation_config.read_generation_config(path)
    defaults = generation_config.sampling_defaults(generation) if how.recommended else generation_config.NONE
    if how.fp8_cache and is_llama_like(content) and content.get("model_type") not in LATENT:
        how = replace(how, kv_scales=read_scales(source))
    how = replace(how, says_8_bits=rounds_inputs(content))
    decoder = _decoder(name, path, content, dtype, how, source)
    if how.kv_scales:
        decoder.load_lora = None
        reason = "adapters would have to be scaled for the fp8 cache as its checkpoint says, which is not done"
        decoder.lora_support = LoraSupport(refusal=f"{reason}: say --kv-cache-dtype auto")
    named = (*CONTENT_FILES, *PICTURE_FILES) if content.get("model_type") in PICTURES else CONTENT_FILES
    small = [path / file for file in named if (path / file).exists()]
    return LoadedModel(
        name=name,
        decoder=decoder,
        dtype=dtype,
        fingerprint=model_fingerprint(small, files, how.variant(decoder, packed=_has_codes(content))),
        eos_token_ids=_end_tokens(generation, content),
        tokenizer=find_tokenizer(name, path, how.cache_dir),
        sampling_defaults=defaults,
        pooling=read_pooling(name, path, content, decoder.hidden_size),
    )


def _has_codes(content: Mapping[str, Any]) -> bool:
    """Whether the weights of a directory are packed from codes, so that `auto` rounds the inputs of their products."""
    found = content.get("quantization_config")
    return is_mxfp4(content) or (found is not None and has_integers(found))


def _decoder(
    name: str, path: Path, content: Mapping[str, Any], dtype: torch.dtype, how: LoadOptions, source: WeightSource
) -> Decoder:
    """One of our decoders if it computes what the configuration says, else the model's own code."""
    if is_llama_like(content) or is_mixture(content):
        config = LlamaConfig.from_dict(content).limited_to(how.context_tokens)
        source = open_source(source, content)
        if how.kv_scales:
            log.info("keys and values of %d layers are scaled for the cache as the checkpoint says", len(how.kv_scales))
            source = KvScaledSource(source, how.kv_scales, config.qkv_rows, config.norm_offset)
        if is_bare(source):
            source = PrefixedSource(source)
            if not config.tied:
                log.warning("this checkpoint has no output projection: it gives vectors, and texts without sense")
                config = replace(config, tied=True)
        source = in_halves(source, config.num_heads, config.latent)
        if how.native(config):
            return native(source, config, dtype, how, _packed_files(name, path, dtype, how))
        if how.keeps:
            return kept(source, config, dtype, how)
        share = how.device_share(config)
        if share is None:
            tensors = llama.prepare(source, config, dtype, how.progress)
        else:
            checkpoint = CheckpointReader(source, dtype, how.progress)
            tensors = llama.collect(checkpoint, share.cutting(checkpoint.read_stacked, how.device), config)
        return op_by_op(config, tensors, how, share, is_cut=True)
    if is_gpt_like(content):
        return gpt_decoder(source, content, dtype, how)
    if has_encoder(content):
        return encoder_decoder(content, path, _packed_files(name, path, dtype, how))
    if content.get("model_type") not in (*THROUGH_TRANSFORMERS, *PICTURES):
        log.warning("model_type %r is not in the table of supported models", content.get("model_type"))
    if content.get("model_type") in PICTURES:
        return picture_decoder(name, path, content, dtype, how, _packed_files(name, path, dtype, how))
    is_plain = not isinstance(source, TextSource) and content.get("quantization_config") is None
    if is_plain and not (how.packs_layers() and how.rounds):
        from gpu_worker.models.through_transformers.decoder import (
            TransformersDecoder,
        )  # seconds that others do not need

        return TransformersDecoder.load(path, dtype, how.ops, how.device)
    plain = {key: value for key, value in content.items() if key != "quantization_config"}
    opened = open_source(source, content)
    packed = _packed_files(name, path, dtype, how)
    return of_tensors(plain, opened, lambda left_out, own: decoded(opened, left_out, own), packed)


def _packed_files(name: str, path: Path, dtype: torch.dtype, how: LoadOptions) -> PackedFiles:
    deciding = [path / file for file in DECIDING_FILES if (path / file).exists()]
    return PackedFiles(name, weight_files(path), deciding, dtype, how)


def _end_tokens(generation: Mapping[str, Any], content: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens in generation_config.json, which lists more of them, or else in config.json."""
    found = generation.get("eos_token_id")
    ids = found if found is not None else content.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise BadModel(f"eos_token_id: {ids!r} are no token ids")
    return tuple(sorted(set(ids)))


def _stored_dtype(content: Mapping[str, Any]) -> torch.dtype:
    name = content.get("dtype") or content.get("torch_dtype") or "bfloat16"
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return known.get(str(name), torch.bfloat16)
