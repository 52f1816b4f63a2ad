"""Reads the tensors of a GGUF file as a model of Transformers has them in memory (`families`)."""

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import ProgressCallback
from gpu_worker.models.gguf.recipes import Family
from gpu_worker.models.gguf.tensors import ROPE_FACTORS, read_tensor
from octavo.model_files.gguf import GgufFile
from octavo.request.errors import BadModel


def prepare(file: GgufFile, family: Family, dtype: torch.dtype, on_tensor: ProgressCallback) -> dict[str, Tensor]:
    """The model's tensors by its own names, in `dtype`. BadModel if the file lacks a tensor, or has one too many."""
    used = {name for recipe in family.recipes.values() for name in recipe.of}
    if lacking := sorted(used - set(file.tensors)):
        raise BadModel(f"{file.path.name} has no tensor {lacking[0]!r}")
    if left := sorted(set(file.tensors) - used - family.unused - {ROPE_FACTORS}):
        some = f"{', '.join(left[:5])}{' …' if len(left) > 5 else ''}"
        raise BadModel(f"{len(left)} tensors of {file.path.name} have no place in the model: {some}")
    tensors = {}
    for name, recipe in family.recipes.items():
        joined = recipe.join([read_tensor(file, part) for part in recipe.of])
        tensors[name] = joined.to(dtype).contiguous()
        for part in recipe.of:
            file.release(part)
        on_tensor(len(tensors), len(family.recipes))
    return tensors


def rope_factors(file: GgufFile, family: Family) -> Tensor | None:
    """What the frequencies of rotary positions are divided by; None: by nothing, or as the configuration says."""
    given = ROPE_FACTORS in file.tensors and ROPE_FACTORS not in family.unused
    return read_tensor(file, ROPE_FACTORS).flatten() if given else None
