"""Rewrites three GGUF types that have no kernel as blocks of a type that has one, with equal numbers (HELD_AS).

| of | in | because |
|---|---|---|
| TQ1_0, TQ2_0 | Q4_0 | 256 numbers share a factor, and each is from -1 to 2: eight blocks with that factor |
| IQ3_S | Q6_K | 256 share a factor, each 32 a whole scale of 8 bits, and each is a whole number of 6 bits |

Factors (float16) are moved, not computed with. The whole numbers are what the gguf package decodes where a factor is 1.
"""

from collections.abc import Callable

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from octavo.model_files.gguf import TensorType
from octavo.model_files.gguf_support import HELD_AS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

PIECE_BLOCKS = 1 << 8
FACTOR_LAST = (TensorType.TQ1_0, TensorType.TQ2_0)
ONE = np.array([1.0], dtype="<f2").view(np.uint8)


def held_blocks(data: memoryview, kind: TensorType) -> Tensor:
    """The bytes of a tensor in blocks that a kernel multiplies, in new memory: its own, or others of equal numbers."""
    held = HELD_AS.get(kind)
    if held is None:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, kind.num_bytes)
    out = np.empty((len(blocks), kind.block // held.block * held.num_bytes), dtype=np.uint8)
    for start in range(0, len(blocks), PIECE_BLOCKS):  # a piece stays in the processor's cache
        piece = blocks[start : start + PIECE_BLOCKS]
        out[start : start + PIECE_BLOCKS] = _WRITERS[held](piece, *_divided(kind, piece)).reshape(len(piece), -1)
    return torch.from_numpy(out).flatten()


def _divided(kind: TensorType, blocks: Bytes) -> tuple[Bytes, Floats]:
    """The factors of blocks, and what is multiplied with them."""
    place = slice(kind.num_bytes - 2, None) if kind in FACTOR_LAST else slice(0, 2)
    ones = blocks.copy()
    ones[:, place] = ONE
    return blocks[:, place], dequantize(ones, GGMLQuantizationType(kind))


def _q4_0(_: Bytes, factors: Bytes, numbers: Floats) -> Bytes:
    halves = (numbers + 8).astype(np.uint8).reshape(-1, 2, 16)
    return np.hstack([factors.repeat(8, axis=0), halves[:, 0] | halves[:, 1] << 4])


def _q6_k(blocks: Bytes, factors: Bytes, numbers: Floats) -> Bytes:
    scales = _scales_of_iq3_s(blocks)
    each = numbers.reshape(-1, 16, 16)
    whole = np.divide(each, scales[..., None], out=np.zeros_like(each), where=scales[..., None] != 0)
    codes = (whole + 32).astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of a block, and quarters of these
    low, high = codes & 15, codes >> 4
    nibbles = low[:, :, :2] | low[:, :, 2:] << 4
    bits = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = nibbles.reshape(len(blocks), -1), bits.reshape(len(blocks), -1), scales.astype(np.int8).view(np.uint8)
    return np.hstack([*parts, factors])


def _scales_of_iq3_s(blocks: Bytes) -> NDArray[np.int32]:
    """Odd numbers up to 31, in 4 bits each, for 32 numbers."""
    stored = blocks[:, -4:].astype(np.int32)
    nibbles = np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(blocks), 8)
    return (1 + 2 * nibbles).repeat(2, axis=1)


_WRITERS: dict[TensorType, Callable[[Bytes, Bytes, Floats], Bytes]] = {
    TensorType.Q4_0: _q4_0,
    TensorType.Q6_K: _q6_k,
}
