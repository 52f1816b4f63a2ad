"""NumPy arrays as the extension takes them, what their bytes mean, and how near two must be."""

from typing import Any

import numpy as np

F32, F16, BF16, U8, I8, I32, I64 = range(7)
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.2e-2}


class Array:
    """A NumPy array that knows what its elements are: bfloat16 is held as uint16."""

    def __init__(self, data: np.ndarray, dtype: int) -> None:
        self.data, self.dtype = data, dtype

    @classmethod
    def of(cls, values: np.ndarray, dtype: int) -> "Array":
        if dtype == BF16:
            bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
            rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
            return cls(np.where(np.isnan(values), np.uint16(0x7FC0), rounded), dtype)
        kinds = {F32: np.float32, F16: np.float16, U8: np.uint8, I8: np.int8, I32: np.int32, I64: np.int64}
        return cls(np.array(values, dtype=kinds[dtype]), dtype)

    def values(self) -> np.ndarray:
        if self.dtype == BF16:
            return (self.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return self.data.astype(np.float64)

    @property
    def ref(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        return ref(self.data, self.dtype)


def ref(data: np.ndarray, dtype: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return data.ctypes.data, dtype, data.shape, tuple(stride // data.itemsize for stride in data.strides)


def i32(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def fp8_values(kind: str) -> np.ndarray:
    """What each byte means; NaN for those that are no number."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if kind == "fp8_e4m3" else (5, 2, 15)
    codes = np.arange(256)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    size = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - bias - mantissa_bits),
        (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias),
    )
    if kind == "fp8_e4m3":
        size[(codes & 0x7F) == 0x7F] = np.nan
    else:
        size[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    return np.where(codes & 0x80, -size, size)


def to_fp8(values: np.ndarray, kind: str) -> np.ndarray:
    """The nearest number, the even code on ties; too large: the largest."""
    table = fp8_values(kind)
    codes = np.flatnonzero(np.isfinite(table) & (np.arange(256) < 128))
    sizes = table[codes]
    size = np.minimum(np.abs(values), sizes[-1])
    high = np.searchsorted(sizes, size)
    low = np.maximum(high - 1, 0)
    below, above = size - sizes[low], sizes[high] - size
    pick = np.where((below < above) | ((below == above) & (codes[low] % 2 == 0)), low, high)
    return (codes[pick] | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def decoded(data: np.ndarray, dtype: int, kind: str) -> np.ndarray:
    if kind.startswith("fp8"):
        return fp8_values(kind)[data]
    return Array(data, I8 if kind == "int8" else dtype).values()


def close(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert np.isfinite(got).all(), f"{what}: not finite"
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error <= tolerance or np.abs(got - want).max(initial=0) < 1e-6, f"{what}: error {error:.2e}"
    worst = np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-30)
    assert worst <= 8 * tolerance or np.abs(got - want).max(initial=0) < 1e-6, f"{what}: worst {worst:.2e}"
