"""The tensors that a GGUF file is converted to, made once and then taken from the cache on disk."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weight_cache import WeightCache
from gpu_worker.models.fingerprint import sample_file
from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_parts import model_name

CACHE_VERSION = 6  # rises when `convert` or dequantization make other tensors of the same file


def converted(
    file: GgufFile,
    dtype: torch.dtype,
    cache_dir: Path | None,
    convert: Callable[[], dict[str, Tensor]],
    left_out: Collection[str] = (),
) -> dict[str, Tensor]:
    """What `convert` makes, from the cache on disk if that has it; `cache_dir` None: there is no cache.

    The names of the tensors that it leaves out are part of the key.
    """
    cache = WeightCache(cache_dir) if cache_dir else None
    key, name = _cache_key(file.paths, dtype), model_name(file.path)
    if left_out:
        key += f"-{hashlib.blake2b(' '.join(sorted(left_out)).encode(), digest_size=8).hexdigest()}"
    tensors = cache.load(name, key) if cache else None
    if tensors is None:
        tensors = convert()
        if cache and cache.store(name, key, tensors):
            # The converted tensors are private memory; the pages of the file are shared by all workers of the machine.
            tensors = cache.load(name, key) or tensors
    return tensors


def _cache_key(paths: Sequence[Path], dtype: torch.dtype) -> str:
    """Changes with the content of the files, as far as samples and times tell, and with the way it is converted."""
    samples = "".join(sample_file(path).hex() for path in paths)
    digest = samples if len(paths) == 1 else hashlib.blake2b(samples.encode(), digest_size=8).hexdigest()
    stats = [path.stat() for path in paths]
    size, changed = sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)
    dtype_name = str(dtype).removeprefix("torch.")
    return f"{digest[:16]}-{size:x}-{changed:x}-{dtype_name}-v{CACHE_VERSION}"
