"""The types that keys and values are stored in, and the conversions to and from them.

A layer of an arena is [num_blocks, num_kv_heads, 2, block_size, width]. Floats, fp8 among them, are stored as they are,
and width is head_dim. In int8 every slot of every head has a scale of its own, made when the slot is written, so what
is stored depends on nothing but the key or value itself. Then width is head_dim + 2, and a page (the last two
dimensions) holds first its block_size * head_dim numbers, then block_size scales in float16.
"""

import torch
from torch import Tensor

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


def raw(stored: Tensor) -> Tensor:
    """The same memory as a type that torch can index. Numbers of 8 bits become bytes."""
    return stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored


def poison(stored: Tensor) -> tuple[Tensor, float]:
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
    factors = torch.where(scales > 0, 1 / scales.float(), 0)[..., None]
    return (wide * factors).round().clamp(-LARGEST_INT, LARGEST_INT).nan_to_num().to(torch.int8), scales


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
