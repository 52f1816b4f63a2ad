"""The packed weights of a checkpoint: from their file, or packed now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_worker.models.checkpoint.kv_scales import digest_of
from gpu_worker.models.loading.load_options import LoadOptions
from gpu_worker.models.packed.packed_cache import Packing, content_key
from gpu_worker.models.packed.packed_weights import PackedWeights, weights_of
from gpu_worker.models.packed.packing import PACKING
from gpu_worker.ops.native import CPU_BITS


@dataclass(frozen=True, slots=True)
class PackedFiles:
    """`files` of weights, and `deciding` small ones, are what is packed."""

    name: str
    files: Sequence[Path]
    deciding: Sequence[Path]
    dtype: torch.dtype
    how: LoadOptions

    def weights(self, packing: Packing, more: Mapping[str, Any]) -> PackedWeights:
        """`more` is what else decides what is packed."""
        cache, how = self.how.packed_cache, self.how
        if cache is None or not cache.is_worth(self.files):
            return packing.in_memory()
        version = f"{PACKING} of {packing.extension.version()}, bits {CPU_BITS}"
        key = content_key(self.files, self.deciding) | {"dtype": str(self.dtype), "packing": version}
        key |= {"scheme": weights_of(how.quantization), "kv_scales": digest_of(how.kv_scales), **more}
        return cache.get(self.name, key, packing) or packing.in_memory()
