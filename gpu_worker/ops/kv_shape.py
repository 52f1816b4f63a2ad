"""The form of a KV block, and memory for blocks of that form.

Layout `hnd`, layer by layer: [num_layers, num_blocks, num_kv_heads, 2, block_size, width] (kv_format.py). A page of one
head is one run of memory, scales included, and device and host agree byte for byte, so swapping and migrating never
rearrange.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.ops import kv_format

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The form of a block."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        slots = self.num_layers * self.num_kv_heads * 2 * self.block_size
        return slots * kv_format.width(self.dtype, self.head_dim) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return kv_format.NAMES[self.dtype]

    @property
    def layout(self) -> str:
        """Equal for two arenas exactly if a block's bytes mean the same in both."""
        return f"hnd.{self.dtype_name}.l{self.num_layers}.h{self.num_kv_heads}.b{self.block_size}.d{self.head_dim}"

    def allocate_arena(self, num_blocks: int, device: torch.device, pinned: bool = False) -> Tensor:
        """Zeroed memory of `num_blocks` blocks. On a CPU it costs nothing until it is written."""
        page = self.block_size, kv_format.width(self.dtype, self.head_dim)
        shape = self.num_layers, num_blocks, self.num_kv_heads, 2, *page
        if device.type == "cpu" and not pinned:
            return _untouched(num_blocks * self.bytes_per_block).view(self.dtype).view(shape)
        return torch.zeros(shape, dtype=self.dtype, device=device, pin_memory=pinned)


def _untouched(num_bytes: int) -> Tensor:
    """Zeros that no page has been taken for yet (torch.zeros writes them all), aligned for vector loads."""
    memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes])
