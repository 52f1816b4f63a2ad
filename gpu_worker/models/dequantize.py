"""GGUF's number formats as float32, vectorized.

A few thousand blocks are decoded at a time, so that what is between stays in the processor's cache. A block is a fixed
number of values in a row with common scales; names follow the format's own (d: scale, m: minimum, qs: low bits, qh:
high bits).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.errors import BadModel
from octavo.gguf import BLOCK_SIZES, TensorType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Blocks = NDArray[np.void]

BLOCKS_AT_ONCE = 8192


def dequantize(data: memoryview, kind: TensorType, num_values: int) -> Floats:
    """The values of a tensor, in order, in new memory. BadModel for a format that is not decoded."""
    if kind in _PLAIN:
        return _PLAIN[kind](data)
    if kind not in _QUANTIZED:
        known = ", ".join(sorted(k.name for k in (*_PLAIN, *_QUANTIZED)))
        raise BadModel(f"tensors of type {kind.name} are not read (these are: {known})")
    layout, decode = _QUANTIZED[kind]
    size, num_bytes = BLOCK_SIZES[kind]
    if layout.itemsize != num_bytes:
        raise BadModel(f"{kind.name}: layout of {layout.itemsize} bytes, not {num_bytes}")
    blocks = np.frombuffer(data, dtype=layout)
    values = np.empty((num_values // size, size), dtype=np.float32)
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        end = start + BLOCKS_AT_ONCE
        decode(blocks[start:end], values[start:end])
    return values.reshape(-1)


def _f32(data: memoryview) -> Floats:
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


def _f16(data: memoryview) -> Floats:
    return np.frombuffer(data, dtype="<f2").astype(np.float32)


def _bf16(data: memoryview) -> Floats:
    return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


def _column(blocks: Blocks, name: str) -> Floats:
    scale: Floats = blocks[name].astype(np.float32)[:, None]
    return scale


def _nibbles(blocks: Blocks, out: Floats) -> None:
    """16 bytes: values 0…15 in the low halves, 16…31 in the high ones."""
    qs = blocks["qs"]
    out[:, :16] = qs & 15
    out[:, 16:] = qs >> 4


def _fifth_bits(blocks: Blocks, out: Floats) -> None:
    """Adds bit i of the 32-bit word `qh` to value i, as its fifth bit."""
    bits = np.unpackbits(blocks["qh"], axis=1, bitorder="little")
    out += bits * np.float32(16)


def _q4_0(blocks: Blocks, out: Floats) -> None:
    _nibbles(blocks, out)
    out -= 8
    out *= _column(blocks, "d")


def _q4_1(blocks: Blocks, out: Floats) -> None:
    _nibbles(blocks, out)
    out *= _column(blocks, "d")
    out += _column(blocks, "m")


def _q5_0(blocks: Blocks, out: Floats) -> None:
    _nibbles(blocks, out)
    _fifth_bits(blocks, out)
    out -= 16
    out *= _column(blocks, "d")


def _q5_1(blocks: Blocks, out: Floats) -> None:
    _nibbles(blocks, out)
    _fifth_bits(blocks, out)
    out *= _column(blocks, "d")
    out += _column(blocks, "m")


def _q8_0(blocks: Blocks, out: Floats) -> None:
    np.multiply(blocks["qs"], _column(blocks, "d"), out=out)


def _k_scales(blocks: Blocks) -> tuple[Floats, Floats]:
    """A K block's eight scales and minimums, 6 bits each in 12 bytes: four whole, four with their high bits apart."""
    low, mid, high = blocks["scales"][:, 0:4], blocks["scales"][:, 4:8], blocks["scales"][:, 8:12]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=1)
    mins = np.concatenate((mid & 63, (high >> 4) | (mid >> 6 << 4)), axis=1)
    return scales * _column(blocks, "d"), mins * _column(blocks, "dmin")


def _k_nibbles(blocks: Blocks, parts: Floats) -> None:
    """128 bytes: each 32 hold one part of 32 values in their low halves and the next in their high ones."""
    qs = blocks["qs"].reshape(-1, 4, 32)
    parts[:, 0::2] = qs & 15
    parts[:, 1::2] = qs >> 4


def _q4_k(blocks: Blocks, out: Floats) -> None:
    parts = out.reshape(-1, 8, 32)
    _k_nibbles(blocks, parts)
    scales, mins = _k_scales(blocks)
    parts *= scales[:, :, None]
    parts -= mins[:, :, None]


def _q5_k(blocks: Blocks, out: Floats) -> None:
    parts = out.reshape(-1, 8, 32)
    _k_nibbles(blocks, parts)
    for part in range(8):
        parts[:, part] += (blocks["qh"] >> part & 1) * np.float32(16)
    scales, mins = _k_scales(blocks)
    parts *= scales[:, :, None]
    parts -= mins[:, :, None]


def _q6_k(blocks: Blocks, out: Floats) -> None:
    low, high = blocks["ql"].reshape(-1, 2, 2, 32), blocks["qh"].reshape(-1, 2, 32)
    parts = out.reshape(-1, 2, 4, 32)
    for part in range(4):  # low bits: 0, 1 in the low halves of both 32 bytes, 2, 3 in the high ones
        bits = low[:, :, part % 2] >> (part // 2 * 4) & 15
        parts[:, :, part] = bits | ((high >> 2 * part & 3) << 4)
    out -= 32
    scales = blocks["scales"] * _column(blocks, "d")
    sixteens = out.reshape(-1, 16, 16)
    sixteens *= scales[:, :, None]


_PLAIN: dict[TensorType, Callable[[memoryview], Floats]] = {
    TensorType.F32: _f32,
    TensorType.F16: _f16,
    TensorType.BF16: _bf16,
}
_K_HEAD = [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12)]
_QUANTIZED: dict[TensorType, tuple[np.dtype[np.void], Callable[[Blocks, Floats], None]]] = {
    TensorType.Q4_0: (np.dtype([("d", "<f2"), ("qs", "u1", 16)]), _q4_0),
    TensorType.Q4_1: (np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]), _q4_1),
    TensorType.Q5_0: (np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]), _q5_0),
    TensorType.Q5_1: (np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]), _q5_1),
    TensorType.Q8_0: (np.dtype([("d", "<f2"), ("qs", "i1", 32)]), _q8_0),
    TensorType.Q4_K: (np.dtype([*_K_HEAD, ("qs", "u1", 128)]), _q4_k),
    TensorType.Q5_K: (np.dtype([*_K_HEAD, ("qh", "u1", 32), ("qs", "u1", 128)]), _q5_k),
    TensorType.Q6_K: (np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]), _q6_k),
}
