"""Opens a GGUF file: its settings, and the decoder that computes them."""

import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpu_worker.models import generation_config
from gpu_worker.models.converted_weights import converted
from gpu_worker.models.decoders import llama
from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.models.decoders.gpt_families import is_gpt_like
from gpu_worker.models.decoders.latent.latent_source import in_halves
from gpu_worker.models.fingerprint import model_fingerprint
from gpu_worker.models.gguf.families import read_family
from gpu_worker.models.gguf.header import GgufHeader, architecture
from gpu_worker.models.gguf.recipe_source import RecipeSource, prepare, rope_factors
from gpu_worker.models.gguf.sources import source_of
from gpu_worker.models.loading.load_options import LoadOptions
from gpu_worker.models.loading.loaded_model import LoadedModel
from gpu_worker.models.loading.own_decoders import gpt_decoder, kept, native, op_by_op
from gpu_worker.models.loading.packed_files import PackedFiles
from gpu_worker.models.loading.transformers_models import of_tensors
from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_support import end_token_ids, has_tokenizer, runs_through_transformers
from octavo.pooling.params import ModelPooling

log = logging.getLogger(__name__)


def load_gguf(name: str, path: Path, how: LoadOptions) -> LoadedModel:
    dtype = how.dtype or (torch.float32 if how.device.type == "cpu" else torch.bfloat16)
    with GgufFile(path) as file:
        architecture(file)
        decode = _gguf_through_transformers if runs_through_transformers(file) else _gguf_decoder
        decoder = decode(name, file, dtype, how)
        ends = tuple(sorted(end_token_ids(file.metadata)))
        has_text = has_tokenizer(file.metadata)
    if not has_text:
        remedy = "give routers --tokenizer to serve text; until then it takes token ids only"
        log.warning("model %s has no tokenizer (the file has no tokenizer.ggml.model): %s", name, remedy)
    return LoadedModel(
        name=name,
        decoder=decoder,
        dtype=dtype,
        fingerprint=model_fingerprint([], file.paths, how.variant(decoder, packed=True)),
        eos_token_ids=ends,
        tokenizer=str(path) if has_text else "",
        sampling_defaults=generation_config.NONE,
        pooling=ModelPooling(decoder.hidden_size),
    )


def _gguf_decoder(name: str, file: GgufFile, dtype: torch.dtype, how: LoadOptions) -> Decoder:
    content, stored = source_of(file)
    if is_gpt_like(content):
        return gpt_decoder(stored, content, dtype, how)
    config = llama.with_stored_parts(LlamaConfig.from_dict(content).limited_to(how.context_tokens), stored.names())
    source = in_halves(stored, config.num_heads, config.latent)
    if how.native(config):
        return native(source, config, dtype, how, PackedFiles(name, file.paths, [], dtype, how))
    if how.keeps:
        return kept(source, config, dtype, how)
    share = how.device_share(config)
    tensors = converted(file, dtype, how.cache_dir, lambda: llama.prepare(source, config, dtype, how.progress))
    return op_by_op(config, tensors, how, share, is_cut=False)


def _gguf_through_transformers(name: str, file: GgufFile, dtype: torch.dtype, how: LoadOptions) -> Decoder:
    family = read_family(GgufHeader(file, architecture(file)))
    source = RecipeSource(file, family)

    def read(left_out: Collection[str], _: Collection[str]) -> dict[str, Tensor]:
        make = partial(prepare, file, family, dtype, how.progress, left_out)
        return converted(file, dtype, how.cache_dir, make, left_out)

    factors = rope_factors(file, family)
    return of_tensors(family.config, source, read, PackedFiles(name, file.paths, [], dtype, how), factors)
