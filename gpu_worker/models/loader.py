"""Loads a model by its name onto its device, with all that the rest of the worker needs to know of it."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gpu_worker.models import generation_config
from gpu_worker.models.checkpoint.bare_names import PrefixedSource, is_bare
from gpu_worker.models.checkpoint.kv_scales import KvScaledSource, digest_of, read_scales
from gpu_worker.models.checkpoint.locate import locate
from gpu_worker.models.checkpoint.quantized import decoded, open_source
from gpu_worker.models.checkpoint.weights import (
    BlockSource,
    CheckpointReader,
    ProgressCallback,
    SafetensorsSource,
    WeightSource,
    weight_files,
)
from gpu_worker.models.converted_weights import converted
from gpu_worker.models.decoders import gpt, gpt_weights, llama
from gpu_worker.models.decoders.config import LlamaConfig, is_llama_like, is_mixture
from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.models.decoders.gpt_families import is_gpt_like, read_gpt_config
from gpu_worker.models.decoders.native_llama import LlamaPacking, NativeLlamaDecoder
from gpu_worker.models.decoders.ranks.device_share import LlamaDeviceShare, gpt_team
from gpu_worker.models.decoders.ranks.gpt_share import GptShare
from gpu_worker.models.decoders.ranks.gpt_team import GptTeam
from gpu_worker.models.decoders.ranks.place import RankPlace
from gpu_worker.models.fingerprint import CONTENT_FILES, PICTURE_FILES, model_fingerprint
from gpu_worker.models.gguf import through_transformers
from gpu_worker.models.gguf.experts import source_of
from gpu_worker.models.gguf.families import read_family
from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.tensors import architecture
from gpu_worker.models.load_options import KEPT_SCHEMES, LoadOptions
from gpu_worker.models.model_kind import (
    PICTURES,
    SPEECH,
    TEXT_PARTS,
    THROUGH_TRANSFORMERS,
    has_encoder,
    refuse_unservable,
)
from gpu_worker.models.packed import cuda_packing
from gpu_worker.models.packed.packed_cache import PackedCache, content_key
from gpu_worker.models.packed.packed_weights import A8, SCHEMES, PackedWeights, weights_of
from gpu_worker.models.packed.packing import PACKING
from gpu_worker.models.pooling_files import read_pooling
from gpu_worker.models.text_part import HEAD, TextSource, text_config
from gpu_worker.models.tokenizer_conversion import find_tokenizer
from gpu_worker.ops import Ops
from gpu_worker.ops.native import CPU_BITS
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.ops.native_cuda import NativeCudaOps
from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_support import end_token_ids, runs_through_transformers
from octavo.model_files.lora_support import LoraSupport
from octavo.model_files.quantization import has_integers, is_mxfp4
from octavo.pooling.params import ModelPooling
from octavo.process.telemetry import stack_of
from octavo.request.errors import BadModel, InvalidArgument, ServingError

log = logging.getLogger(__name__)
LONGEST_MESSAGE = 1500  # a command that converts a checkpoint, with its path, has to fit
DECIDING_FILES = ("config.json", "model.safetensors.index.json")  # beside the weights, of what is packed and how


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


def load_model(
    model: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    ops: Ops,
    quantization: str = "auto",
    kv_dtype: str = "auto",
    context_tokens: int | None = None,
    cache_dir: Path | None = None,
    packed_cache: PackedCache | None = None,
    place: RankPlace | None = None,
    recommended_sampling: bool = True,
    on_progress: ProgressCallback | None = None,
) -> LoadedModel:
    """Loads a GGUF file, a directory, `smollm2`, or a name on the hub.

    `dtype` None means float32 on a CPU, and the file's type on a GPU. `quantization` is one of packed_weights.SCHEMES,
    or KEPT_SCHEMES (cuda_packing); all but auto and none need native ops and a decoder of the Llama family, or raise
    InvalidArgument. `kv_dtype` is the type of the cache: for fp8 keys and values are scaled as the checkpoint says.
    `context_tokens` is the length of the longest sequence that will be run, if the model was made for longer ones: a
    model that encodes positions otherwise for long sequences then does so only if one can be long. Raises NotFound if
    there is no such model, and BadModel or MalformedGguf if it cannot be used. Converted GGUF weights and tokenizers
    are kept in `cache_dir`, and what the extension multiplies with in `packed_cache`; None keeps none. With a `place`
    in a group, the decoder is that rank's share (InvalidArgument where a decoder is not divided).
    `recommended_sampling` says whether generation_config.json has a say in sampling.
    """
    started = time.monotonic()
    if quantization not in (*SCHEMES, *KEPT_SCHEMES):
        known = ", ".join((*SCHEMES, *KEPT_SCHEMES))
        raise InvalidArgument("quantization", f"{quantization!r} is not one of {known}")
    found = locate(model)
    progress = on_progress or _ProgressLogger(found.name)
    load = _load_gguf if found.path.is_file() else _load_directory
    how = LoadOptions(
        *(device, dtype, ops, quantization, kv_dtype.startswith("fp8"), context_tokens, cache_dir, packed_cache),
        *(place, recommended_sampling, progress),
    )
    try:
        loaded = load(found.name, found.path, how)
    except BadModel as error:
        named = error.message.startswith((found.name, found.path.name, str(found.path)))
        if named and len(error.message) <= LONGEST_MESSAGE:
            raise
        raise BadModel(shortened(error.message if named else f"{found.name}: {error.message}")) from error
    except Exception as error:
        if isinstance(error, ServingError | OSError) or is_of_the_machine(error):
            raise
        log.info("where it happened:\n%s", stack_of(error))
        what = f"{found.name}: its files are broken or contradict each other ({type(error).__name__}: {error})"
        raise BadModel(f"{shortened(what)}: copy them again from where the model came from") from error
    seconds = time.monotonic() - started
    log.info("model %s (%s, %s) loaded in %.1f s", found.name, loaded.decoder.name, loaded.dtype, seconds)
    return loaded


def is_of_the_machine(error: Exception) -> bool:
    """Whether the machine is to blame and not the model's files: memory is lacking, or a GPU reports an error."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in ("memory", "CUDA", "cuda"))


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}…"


class _ProgressLogger:
    """Writes the progress of loading to the log every few seconds."""

    EVERY_S = 2.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = time.monotonic() + self.EVERY_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.EVERY_S
            log.info("loading %s: %d of %d tensors", self._name, done, total)


def _load_gguf(name: str, path: Path, how: LoadOptions) -> LoadedModel:
    dtype = how.dtype or (torch.float32 if how.device.type == "cpu" else torch.bfloat16)
    with GgufFile(path) as file:
        architecture(file)
        decode = _gguf_through_transformers if runs_through_transformers(file) else _gguf_decoder
        decoder = decode(name, file, dtype, how)
        ends = tuple(sorted(end_token_ids(file.metadata)))
    return LoadedModel(
        name=name,
        decoder=decoder,
        dtype=dtype,
        fingerprint=model_fingerprint([], file.paths, how.variant(decoder, packed=True)),
        eos_token_ids=ends,
        tokenizer=str(path),
        sampling_defaults=generation_config.NONE,
        pooling=ModelPooling(decoder.hidden_size),
    )


def _gguf_decoder(name: str, file: GgufFile, dtype: torch.dtype, how: LoadOptions) -> Decoder:
    content, source = source_of(file)
    config = llama.with_stored_parts(LlamaConfig.from_dict(content).limited_to(how.context_tokens), source.names())
    if how.native(config):
        return _native(name, source, config, dtype, how, file.paths, [])
    if how.keeps:
        return _kept(source, config, dtype, how)
    share = how.device_share(config)
    tensors = converted(file, dtype, how.cache_dir, lambda: llama.prepare(source, config, dtype, how.progress))
    return _op_by_op(config, tensors, how, share, is_cut=False)


def _gguf_through_transformers(name: str, file: GgufFile, dtype: torch.dtype, how: LoadOptions) -> Decoder:
    family = read_family(GgufHeader(file, architecture(file)))
    source = through_transformers.RecipeSource(file, family)

    def read(left_out: Collection[str]) -> dict[str, Tensor]:
        prepare = partial(through_transformers.prepare, file, family, dtype, how.progress, left_out)
        return converted(file, dtype, how.cache_dir, prepare, left_out)

    factors = through_transformers.rope_factors(file, family)
    return _of_tensors(file.path.name, family.config, source, read, dtype, how, factors)


def _of_tensors(
    name: str,
    config: Mapping[str, Any],
    source: WeightSource,
    read: Callable[[Collection[str]], dict[str, Tensor]],
    dtype: torch.dtype,
    how: LoadOptions,
    rope_factors: Tensor | None = None,
) -> Decoder:
    """A decoder through Transformers, of which the extension multiplies the layers that it can on a CPU."""
    from gpu_worker.models.packed.packed_linear import LayerPacking
    from gpu_worker.models.through_transformers.decoder import TransformersDecoder

    packing = None
    if how.packs_layers():
        extension = cast("NativeCpuOps", how.ops).extension
        packing = LayerPacking(source, dtype, how.quantization, extension, how.progress)
    decoder = TransformersDecoder.of_tensors(name, config, read, dtype, how.ops, how.device, rope_factors, packing)
    if how.rounds and decoder.packed is None:
        raise InvalidArgument("quantization", f"{how.quantization}: no layer of this model is packed: say auto")
    if how.quantization.endswith(A8) and not cast("PackedWeights", decoder.packed).rounds_to_8_bits():
        raise _without_8_bits(how)
    return decoder


def _load_directory(name: str, path: Path, how: LoadOptions) -> LoadedModel:
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
    if how.fp8_cache and is_llama_like(content):
        how = replace(how, kv_scales=read_scales(source))
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
        if how.native(config):
            deciding = [path / file for file in DECIDING_FILES if (path / file).exists()]
            return _native(name, source, config, dtype, how, weight_files(path), deciding)
        if how.keeps:
            return _kept(source, config, dtype, how)
        share = how.device_share(config)
        if share is None:
            tensors = llama.prepare(source, config, dtype, how.progress)
        else:
            checkpoint = CheckpointReader(source, dtype, how.progress)
            tensors = llama.collect(checkpoint, share.cutting(checkpoint.read_stacked, how.device), config)
        return _op_by_op(config, tensors, how, share, is_cut=True)
    if is_gpt_like(content):
        return _gpt(source, content, dtype, how)
    if has_encoder(content):
        how.native(None)
        return _encoder_decoder(path, content, dtype, how)
    if content.get("model_type") not in (*THROUGH_TRANSFORMERS, *PICTURES):
        log.warning("model_type %r is not in the table of supported models", content.get("model_type"))
    if content.get("model_type") in PICTURES:
        how.native(None)
        from gpu_worker.models.through_transformers.picture_decoder import PictureDecoder

        return PictureDecoder.load_with_pictures(path, content, dtype, how.ops, how.device)
    is_plain = not isinstance(source, TextSource) and content.get("quantization_config") is None
    if is_plain and not (how.packs_layers() and how.rounds):
        from gpu_worker.models.through_transformers.decoder import (
            TransformersDecoder,
        )  # seconds that others do not need

        return TransformersDecoder.load(path, dtype, how.ops, how.device)
    plain = {key: value for key, value in content.items() if key != "quantization_config"}
    opened = open_source(source, content)
    return _of_tensors(name, plain, opened, lambda left_out: decoded(opened, left_out), dtype, how)


def _op_by_op(
    config: LlamaConfig,
    tensors: dict[str, Tensor],
    how: LoadOptions,
    share: LlamaDeviceShare | None,
    *,
    is_cut: bool,
) -> Decoder:
    """With a share its matrices have the own rows alone, if they are cut already."""
    if share is None:
        return llama.LlamaDecoder(config, tensors, how.ops, how.device)
    own = share.finished(tensors, is_cut=is_cut)
    return llama.LlamaDecoder(config, own, how.ops, how.device, share.team(how.device))


def _gpt(source: WeightSource, content: Mapping[str, Any], dtype: torch.dtype, how: LoadOptions) -> Decoder:
    how.refuse_packed()
    sizes = read_gpt_config(content)
    share = None if how.place is None else GptShare.of(sizes, how.place)  # before the tensors are read
    on_device = gpt_team(sizes, how.place) if how.place is not None and how.place.has_device else None
    tensors = gpt_weights.prepare(source, sizes, dtype, how.progress)
    if how.place is None or share is None:
        return gpt.GptDecoder(sizes, tensors, how.ops, how.device)
    if on_device is not None:
        return gpt.GptDecoder(sizes, share.cut(tensors, sizes), how.ops, how.device, on_device(how.device))
    team = GptTeam(sizes, share, how.place, dtype)
    return gpt.GptDecoder(sizes, share.cut(tensors, sizes), how.ops, how.device, team)


def _encoder_decoder(path: Path, content: Mapping[str, Any], dtype: torch.dtype, how: LoadOptions) -> Decoder:
    from gpu_worker.models.through_transformers.encoder_decoder import EncoderDecoder

    if how.device.type != "cpu":
        reason = "models with an encoder have been run on CPUs alone so far: say cpu"
        raise InvalidArgument("device", reason)
    kind: type[EncoderDecoder] = EncoderDecoder
    if content.get("model_type") in SPEECH:
        from gpu_worker.models.through_transformers.speech_decoder import SpeechDecoder

        kind = SpeechDecoder
    return kind.load_with_encoder(path, dtype, how.ops, how.device, how.context_tokens)


def _native(
    name: str,
    source: WeightSource,
    config: LlamaConfig,
    dtype: torch.dtype,
    how: LoadOptions,
    files: list[Path],
    deciding: list[Path],
) -> Decoder:
    """A decoder of the extension. `files` of weights, and `deciding` small ones, are what is packed."""
    extension = cast("NativeCpuOps", how.ops).extension
    if how.quantization == f"auto{A8}" and not isinstance(source, BlockSource):
        raise _without_8_bits(how)
    packing = LlamaPacking(source, config, dtype, how.quantization, extension, how.progress)
    packed = None
    if how.packed_cache is not None and how.packed_cache.is_worth(files):
        version = f"{PACKING} of {extension.version()}, bits {CPU_BITS}"
        key = content_key(files, deciding) | {"dtype": str(dtype), "packing": version}
        key["scheme"] = weights_of(how.quantization)
        key["kv_scales"] = digest_of(how.kv_scales)
        packed = how.packed_cache.get(name, key, how.quantization, extension, packing.into)
    packed = packed or packing.in_memory()
    if how.quantization.endswith(A8) and not packed.rounds_to_8_bits():
        raise _without_8_bits(how)
    return NativeLlamaDecoder(config.rounded_to(dtype), packed, extension, how.place)


def _without_8_bits(how: LoadOptions) -> InvalidArgument:
    remedy = "say q8-a8 or q4-a8, or leave -a8 out" if weights_of(how.quantization) == "auto" else "leave -a8 out"
    reason = f"inputs are rounded for matrices of 3 to 8 bits alone, and no layer has one here: {remedy}"
    return InvalidArgument("quantization", f"{how.quantization}: {reason}")


def _kept(source: WeightSource, config: LlamaConfig, dtype: torch.dtype, how: LoadOptions) -> Decoder:
    """A decoder on a GPU whose matrices stay in 4 bits and fp8."""
    if dtype == torch.float32:
        raise InvalidArgument("quantization", "kept multiplies in 16 bits: say --dtype bfloat16 or float16")
    rounds = how.quantization.endswith(A8)
    if rounds and not cast("NativeCudaOps", how.ops).extension.multiplies_fp8(how.device.index or 0):
        reason = "the kernels of this build multiply no fp8 on this GPU: it takes 8.9 or later, and code for it"
        raise InvalidArgument("quantization", f"{how.quantization}: {reason}: say kept")
    checkpoint = CheckpointReader(source, dtype, how.progress)
    tensors = llama.collect(checkpoint, cuda_packing.stacks(source, checkpoint, rounds), config)
    decoder = llama.LlamaDecoder(config, tensors, how.ops, how.device)
    if rounds and not any(each.endswith(A8) for each in decoder.formats):
        reason = "inputs are rounded where the checkpoint is fp8 and says how, and no layer has such a matrix"
        raise InvalidArgument("quantization", f"{how.quantization}: {reason}: say kept")
    return decoder


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
