"""The form of a KV block, the types that keys and values are stored in, and the conversions to and from them.

Layout `hnd`, layer by layer: [num_layers, num_blocks, num_kv_heads, 2, block_size, width]. A block has the same bytes
on a device and on the host, so neither a swap nor a migration rearranges it.

A layer of an arena is [num_blocks, num_kv_heads, 2, block_size, width]. Floats, fp8 among them, are stored as they are,
and width is head_dim. In int8 every slot of every head has a scale of its own, made when the slot is written, so what
is stored depends on nothing but the key or value itself. Then width is head_dim + 2, and a page (the last two
dimensions) holds first its block_size * head_dim numbers, then block_size scales in float16.

Behind the layers of keys and values an arena has as many more as the state of recurrent layers fills (state_format).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.ops.state_format import NO_STATE, StateShape

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # larger numbers become this one
SCALE_BYTES = 2
LARGEST_INT = 127
LARGEST_SCALE = torch.finfo(torch.float16).max


def width(dtype: torch.dtype, head_dim: int) -> int:
    """How many elements the key, or the value, of one slot and head takes."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def paged_as(layer: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """A layer of an arena as one of heads of another shape, which lie in the first bytes of each block."""
    wide, block_size = width(layer.dtype, head_dim), layer.shape[3]
    if layer.shape[1] == num_kv_heads and layer.shape[4] == wide:
        return layer
    numbers = num_kv_heads * 2 * block_size * wide
    pages: Tensor = layer.flatten(1)[:, :numbers].unflatten(1, (num_kv_heads, 2, block_size, wide))
    return pages


def raw(stored: Tensor) -> Tensor:
    """The same memory as a type that torch can index. Numbers of 8 bits become bytes."""
    return stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored


def spoiling(stored: Tensor) -> tuple[Tensor, float]:
    """A view of the memory, and the value to fill it with so that it holds NaN."""
    return (raw(stored), 255) if stored.dtype.itemsize == 1 else (stored, float("nan"))


def split(kv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The numbers [..., block_size, head_dim] and the scales [..., block_size] of int8 pages, as views."""
    block_size = kv.shape[-2]
    pages = kv.flatten(-2)
    numbers, scales = pages.split((block_size * head_dim, block_size * SCALE_BYTES), dim=-1)
    return numbers.unflatten(-1, (block_size, head_dim)), scales.view(torch.float16)


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., head_dim] as int8, and their scales [...] in float16. The largest number of a row becomes 127.

    A scale is at most the largest float16, so larger rows saturate. The scale is NaN where a number is not finite.
    """
    wide = rows.float()
    tops = wide.abs().amax(-1)
    scales = (tops / LARGEST_INT).clamp(max=LARGEST_SCALE).where(tops.isfinite(), torch.nan).half()
    divisors = torch.where(scales > 0, scales.float(), torch.inf)[..., None]  # with 1 / scale, ties would go astray
    return (wide / divisors).round().clamp(-LARGEST_INT, LARGEST_INT).nan_to_num().to(torch.int8), scales


def encode(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows in any type but int8. Numbers are rounded to nearest; types of 8 bits saturate."""
    if dtype in LARGEST:
        return rows.float().clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return rows.to(dtype)


def decode(pages: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """The numbers [..., block_size, head_dim] that stored pages [..., block_size, width] mean."""
    if pages.dtype != torch.int8:
        return pages.to(dtype)
    numbers, scales = split(pages, head_dim)
    return (numbers.float() * scales.float()[..., None]).to(dtype)


ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    state: StateShape = NO_STATE

    @property
    def bytes_per_block(self) -> int:
        return self.arena_layers * self._layer_bytes

    @property
    def arena_layers(self) -> int:
        """The layers with keys and values, and those that the state of a block fills."""
        return self.num_layers + -(-self.state.num_bytes // self._layer_bytes)

    @property
    def _layer_bytes(self) -> int:
        """How many bytes a block has in each layer of the arena."""
        return self.num_kv_heads * 2 * self.block_size * width(self.dtype, self.head_dim) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return NAMES[self.dtype]

    @property
    def layout(self) -> str:
        """A text that names the layout of a block.

        Two arenas have the same text exactly if a block's bytes mean the same in both.
        """
        pages = f"hnd.{self.dtype_name}.l{self.num_layers}.h{self.num_kv_heads}.b{self.block_size}.d{self.head_dim}"
        return f"{pages}.s{self.state.name}" if self.state.parts else pages

    def allocate_arena(self, num_blocks: int, device: torch.device, pinned: bool = False) -> Tensor:
        """Memory of zeros for `num_blocks` blocks. On a CPU it takes no memory until it is written."""
        if device.type == "cpu" and not pinned:
            return self.arena_in(_untouched(num_blocks * self.bytes_per_block), num_blocks)
        return torch.zeros(self._arena_shape(num_blocks), dtype=self.dtype, device=device, pin_memory=pinned)

    def arena_in(self, memory: Tensor, num_blocks: int) -> Tensor:
        """The arena in memory (uint8) of as many bytes as so many blocks have."""
        return memory.view(self.dtype).view(self._arena_shape(num_blocks))

    def _arena_shape(self, num_blocks: int) -> tuple[int, ...]:
        page = self.block_size, width(self.dtype, self.head_dim)
        return self.arena_layers, num_blocks, self.num_kv_heads, 2, *page


def _untouched(num_bytes: int) -> Tensor:
    """Zeros, aligned for vector loads, that take no memory until they are written (torch.zeros writes them all)."""
    memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes])


KINDS = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8"}


@dataclass(frozen=True, slots=True, eq=False)
class KvLayer:
    """One layer of the arena as the CUDA extension takes it. A stored number times its scale is the number written."""

    keys: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: Tensor  # the same shape
    kind: str  # fp8_e4m3, fp8_e5m2 or int8; auto: the type of the activations
    key_scales: Tensor | None  # int8 only: float16 [num_blocks, num_kv_heads, block_size]
    value_scales: Tensor | None

    @classmethod
    def of(cls, kv: Tensor, head_dim: int) -> "KvLayer":
        """The views of `kv`, a layer as described above."""
        kind = KINDS.get(kv.dtype, "auto")
        if kv.dtype != torch.int8:
            return cls(kv[:, :, 0], kv[:, :, 1], kind, None, None)
        numbers, scales = split(kv, head_dim)
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
