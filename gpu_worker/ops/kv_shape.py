"""The form of a KV block, and memory for blocks of that form.

Layout `hnd`, layer by layer: [num_layers, num_blocks, num_kv_heads, 2, block_size, width] (kv_format.py). The page of
one head is one run of memory, scales included. A block has the same bytes on a device and on the host, so neither a
swap nor a migration rearranges it.
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
        """A text that names the layout of a block.

        Two arenas have the same text exactly if a block's bytes mean the same in both.
        """
        return f"hnd.{self.dtype_name}.l{self.num_layers}.h{self.num_kv_heads}.b{self.block_size}.d{self.head_dim}"

    def allocate_arena(self, num_blocks: int, device: torch.device, pinned: bool = False) -> Tensor:
        """Memory of zeros for `num_blocks` blocks. On a CPU it takes no memory until it is written."""
        page = self.block_size, kv_format.width(self.dtype, self.head_dim)
        shape = self.num_layers, num_blocks, self.num_kv_heads, 2, *page
        if device.type == "cpu" and not pinned:
            return _untouched(num_blocks * self.bytes_per_block).view(self.dtype).view(shape)
        return torch.zeros(shape, dtype=self.dtype, device=device, pin_memory=pinned)


def _untouched(num_bytes: int) -> Tensor:
    """Zeros, aligned for vector loads, that take no memory until they are written (torch.zeros writes them all)."""
    memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes])
