"""Norms and activations; rotation by its definition."""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import BF16, F16, F32, TOLERANCE, Array, close


def rotated(x: np.ndarray, positions: np.ndarray, table: np.ndarray, half: int, interleaved: bool) -> np.ndarray:
    cos, sin = table[positions][:, None, :half], table[positions][:, None, half : 2 * half]
    result = x.copy()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def rows_case(rng: Any) -> None:
    dtype = int(rng.choice([F32, F16, BF16]))
    n, size = int(rng.integers(1, 4)), int(rng.choice([1, 7, 64, 100, 2048 + 8, 4100]))
    pitch = size + int(rng.choice([0, 8, 3]))
    x = Array(Array.of(rng.normal(0, 1, (n, pitch)), dtype).data[:, :size], dtype)
    weight = Array.of(rng.normal(1, 0.1, size), dtype)
    residual = Array.of(rng.normal(0, 1, (n, size)), dtype)
    out = Array.of(np.full((n, size), np.nan), dtype)

    def norm(v: np.ndarray) -> np.ndarray:
        return v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-5) * weight.values()

    native.rms_norm(out.ref, x.ref, weight.ref, 1e-5, 0)
    close(out.values(), norm(x.values()), TOLERANCE[dtype], f"rms_norm {dtype=} {size=} {pitch=}")
    want = x.values() + residual.values()
    native.fused_add_rms_norm(x.ref, residual.ref, weight.ref, 1e-5, 0)
    close(residual.values(), want, TOLERANCE[dtype], "residual")
    close(x.values(), norm(residual.values()), TOLERANCE[dtype], f"fused_add_rms_norm {dtype=} {size=}")
    gate_up = Array.of(rng.normal(0, 2, (n, 2 * size)), dtype)
    gate, up = gate_up.values()[:, :size], gate_up.values()[:, size:]
    native.silu_and_mul(out.ref, gate_up.ref, 0)
    close(out.values(), gate / (1 + np.exp(-gate)) * up, TOLERANCE[dtype], f"silu_and_mul {dtype=} {size=}")
