"""Attention in float64, with the types, shapes, masks and sinks that a case draws."""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import BF16, F16, F32, ref


def attention_setup(rng: Any, kernel: str) -> Any:
    dtype = int(rng.choice([F16, BF16] if kernel == "mma" else [F32, F32, F16, BF16]))
    kind = str(rng.choice(["auto", "auto", "fp8_e4m3", "fp8_e5m2", "int8"]))
    layout = str(rng.choice(["hnd", "nhd"] if kernel == "mma" else ["hnd", "nhd", "xpack"]))
    dims = [32, 64, 96, 128] if kernel == "mma" or layout == "xpack" else [24, 33, 64, 80]
    dim = int(rng.choice([*dims, 256] if rng.random() < 0.15 and kernel == "mma" else dims))
    if kernel == "mma" and kind == "auto" and rng.random() < 0.2:
        dim = 72
    size = int(rng.choice([8, 16, 16, 24, 32, 64, 128]))
    kv_heads, group = int(rng.choice([1, 2])), int(rng.choice([1, 2, 3, 4, 8, 11, 16]))
    return dtype, kind, layout, dim, size, kv_heads, group


class Scoring:
    def __init__(self, rng: Any, heads: int, kv_heads: int, plain: bool = False) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.window, self.soft_cap, self.alibi, self.sinks = 0, 0.0, None, None
        self.sparse: list[int] = []
        self.scale = float(np.float32(rng.uniform(0.05, 0.3)))
        if plain:
            return
        self.window = int(rng.choice([0, 0, 0, 1, 7, 33, 100]))
        self.soft_cap = float(rng.choice([0, 0, 0, 2.5]))
        self.alibi = rng.uniform(-0.1, 0.3, heads).astype(np.float32) if rng.random() < 0.25 else None
        self.sinks = rng.normal(0, 2, heads).astype(np.float32) if rng.random() < 0.25 else None
        if rng.random() < 0.2:
            self.sparse = [
                int(rng.integers(1, 3)),
                int(rng.integers(2, 5)),
                int(rng.choice([8, 16, 24])),
                int(rng.integers(-2, 3)),
                int(rng.integers(0, 2)),
            ]

    def handle(self) -> Any:
        floats = [None if a is None else ref(a, F32) for a in (self.alibi, self.sinks)]
        return native.Attention(self.scale, self.soft_cap, self.window, *floats, self.sparse)

    def seen(self, head: int, position: int) -> np.ndarray:
        """Which of the keys 0 … position the mask leaves to one head's query."""
        places = np.arange(position + 1)
        seen = places > position - self.window if self.window else np.ones(position + 1, dtype=bool)
        if self.sparse:
            local, stride, size, step, rank = self.sparse
            if step >= 0:
                offset = (rank * self.heads + head) * step + 1
            else:
                offset = (rank * self.kv_heads + head // (self.heads // self.kv_heads)) * -step + 1
            seen &= ((places // size + offset) % stride == 0) | (places // size > position // size - local)
        return seen

    def attend(self, query: np.ndarray, head: int, position: int, keys: np.ndarray, values: np.ndarray) -> Any:
        """What one query takes from keys and values 0 … position."""
        places = np.arange(position + 1)
        scores = keys[: position + 1] @ query * self.scale
        if self.soft_cap:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        if self.alibi is not None:
            scores = scores + float(self.alibi[head]) * (places - position)
        seen = self.seen(head, position)
        scores = np.where(seen, scores, -np.inf)
        sink = -np.inf if self.sinks is None else float(self.sinks[head])
        top = max(scores.max(initial=-np.inf), sink)
        if top == -np.inf:
            return np.zeros(values.shape[1])
        weights = np.exp(scores - top)
        total = weights.sum() + np.exp(sink - top)
        return np.where(seen, weights, 0) @ values[: position + 1] / total
