"""Loads a model by its name onto its device, with all that the rest of the worker needs to know of it."""

import logging
import time
from pathlib import Path

import torch

from gpu_worker.models.checkpoint.locate import locate
from gpu_worker.models.checkpoint.weights import ProgressCallback
from gpu_worker.models.decoders.ranks.place import RankPlace
from gpu_worker.models.loading.directory import load_directory
from gpu_worker.models.loading.gguf_file import load_gguf
from gpu_worker.models.loading.load_options import KEPT_SCHEMES, LoadOptions
from gpu_worker.models.loading.loaded_model import LoadedModel
from gpu_worker.models.packed.packed_cache import PackedCache
from gpu_worker.models.packed.packed_weights import SCHEMES
from gpu_worker.ops import Ops
from octavo.process.machine import release_freed_memory
from octavo.process.telemetry import stack_of
from octavo.request.errors import BadModel, InvalidArgument, ServingError

log = logging.getLogger(__name__)
LONGEST_MESSAGE = 1500  # a command that converts a checkpoint, with its path, has to fit


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
    or KEPT_SCHEMES (cuda_packing); all others but auto and none need native ops on a CPU, and raise InvalidArgument for
    models like GPT, or of mixtures with pictures. `kv_dtype` is the type of the cache: for fp8 keys
    and values are scaled as the checkpoint says. `context_tokens` is the length of the longest sequence that will be
    run, if the model was made for longer ones: a model that encodes positions otherwise for long sequences then does so
    only if one can be long. Raises NotFound if there is no such model, and BadModel or MalformedGguf if it cannot be
    used. Converted GGUF weights and tokenizers are kept in `cache_dir`, and what the extension multiplies with in
    `packed_cache`; None keeps none. With a `place` in a group, the decoder is that rank's share (InvalidArgument where
    a decoder is not divided). `recommended_sampling` says whether generation_config.json has a say in sampling.
    """
    started = time.monotonic()
    if quantization not in (*SCHEMES, *KEPT_SCHEMES):
        known = ", ".join((*SCHEMES, *KEPT_SCHEMES))
        raise InvalidArgument("quantization", f"{quantization!r} is not one of {known}")
    found = locate(model)
    progress = on_progress or _ProgressLogger(found.name)
    load = load_gguf if found.path.is_file() else load_directory
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
    release_freed_memory()  # tens of megabytes, of headers and vocabularies that were read
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
