"""A layer of keys and values that is more than one plain tensor: 8-bit with scales, or in vLLM's layout."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.ops import kv_format

KINDS = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8"}


@dataclass(frozen=True, slots=True, eq=False)
class KvLayer:
    """What is stored, times its scale, is what was written."""

    keys: (
        Tensor  # [num_blocks, kv_heads, block_size, head_dim]; xpack: [num_blocks, kv_heads, head_dim/x, block_size, x]
    )
    values: Tensor  # the same; xpack: [num_blocks, kv_heads, head_dim, block_size]
    kind: str = "auto"  # fp8_e4m3, fp8_e5m2, int8; auto: the type of the activations
    # float32 [1] or [kv_heads]; None: 1. For int8 also float16 [num_blocks, kv_heads, block_size]: made by each write.
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @classmethod
    def of(cls, kv: Tensor, key_scale: Tensor | None = None, value_scale: Tensor | None = None) -> "KvLayer":
        """Of `kv` [num_blocks, kv_heads, 2, block_size, head_dim] of any strides; its type says the kind."""
        return cls(kv[:, :, 0], kv[:, :, 1], KINDS.get(kv.dtype, "auto"), key_scale, value_scale)

    @classmethod
    def paged(cls, kv: Tensor, head_dim: int) -> "KvLayer":
        """Of `kv` [num_blocks, kv_heads, 2, block_size, head_dim + 2] in int8, with a scale for each slot."""
        numbers, scales = kv_format.split(kv, head_dim)
        return cls(numbers[:, :, 0], numbers[:, :, 1], "int8", scales[:, :, 0], scales[:, :, 1])

    @property
    def scaled_slots(self) -> bool:
        return self.key_scale is not None and self.key_scale.dim() == 3

    @property
    def packed(self) -> bool:
        return self.keys.dim() == 5

    @property
    def num_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[3] if self.packed else self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.values.shape[2] if self.packed else self.values.shape[3]
