"""One layer of the arena as the CUDA extension takes it: views of its keys, its values and their scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.ops import kv_format

KINDS = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8"}


@dataclass(frozen=True, slots=True, eq=False)
class KvLayer:
    """A stored number times its scale is the number that was written."""

    keys: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: Tensor  # the same shape
    kind: str  # fp8_e4m3, fp8_e5m2 or int8; auto: the type of the activations
    key_scales: Tensor | None  # int8 only: float16 [num_blocks, num_kv_heads, block_size]
    value_scales: Tensor | None

    @classmethod
    def of(cls, kv: Tensor, head_dim: int) -> "KvLayer":
        """The views of `kv`, a layer as kv_format.py describes it."""
        kind = KINDS.get(kv.dtype, "auto")
        if kv.dtype != torch.int8:
            return cls(kv[:, :, 0], kv[:, :, 1], kind, None, None)
        numbers, scales = kv_format.split(kv, head_dim)
        return cls(numbers[:, :, 0], numbers[:, :, 1], kind, scales[:, :, 0], scales[:, :, 1])

    @property
    def num_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]
