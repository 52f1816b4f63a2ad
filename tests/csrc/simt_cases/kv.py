"""Caches of keys and values in every layout and type, and the tables that lead into them."""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import BF16, F16, F32, I8, U8, Array, decoded, ref, to_fp8


class Cache:
    """Blocks in a layout; `keys` and `values` are views [block, head, slot, dim] of them."""

    def __init__(
        self, rng: Any, layout: str, kind: str, dtype: int, shape: tuple[int, int, int, int], slots: bool = False
    ) -> None:
        """`slots`: each slot has a scale of its own, which only int8 has."""
        blocks, heads, size, dim = shape
        self.layout, self.kind, self.dtype = layout, kind, dtype
        stored = {"auto": {F32: np.float32, F16: np.float16, BF16: np.uint16}[dtype], "int8": np.int8}.get(
            kind, np.uint8
        )
        width = np.dtype(stored).itemsize
        if layout == "hnd":
            memory = np.empty((blocks, heads, 2, size, dim), dtype=stored)
            self.keys, self.values = memory[:, :, 0], memory[:, :, 1]
            self.refs = self.keys, self.values
        elif layout == "nhd":
            memory = np.empty((blocks, 2, size, heads, dim), dtype=stored)
            self.keys, self.values = memory[:, 0].swapaxes(1, 2), memory[:, 1].swapaxes(1, 2)
            self.refs = self.keys, self.values
        else:
            x = 16 // width
            packed = np.empty((blocks, heads, dim // x, size, x), dtype=stored)
            turned = np.empty((blocks, heads, dim, size), dtype=stored)
            self.refs = packed, turned
            self.keys, self.values = packed, turned.swapaxes(2, 3)
        for side in self.refs:
            side[...] = {np.uint8: 0x7F, np.int8: 0x7F, np.uint16: 0xFFFF}.get(stored, np.nan)
        self.shape = shape
        self.key_scale = self.value_scale = None
        if kind != "auto":
            count = int(rng.choice([1, heads]))
            self.key_scale = rng.uniform(0.3, 0.7, count).astype(np.float32)
            self.value_scale = rng.uniform(0.3, 0.7, count).astype(np.float32)
            if kind == "int8":
                self.key_scale /= 40
                self.value_scale /= 40
        self.slot_scales = [np.full((blocks, heads, size), np.nan, dtype=np.float16) for _ in range(2 * slots)]

    def side(self, index: int) -> np.ndarray:
        """[block, head, slot, dim], a view where the layout allows it."""
        if self.layout == "xpack" and index == 0:
            return self.refs[0].transpose(0, 1, 3, 2, 4).reshape(self.shape)
        return (self.keys, self.values)[index]

    def put(self, rng: Any, block: int, slot: int) -> None:
        """Random numbers as keys and values of one slot."""
        _, heads, _, dim = self.shape
        for index in range(2):
            if self.kind.startswith("fp8"):
                row = to_fp8(rng.normal(0, 2, (heads, dim)), self.kind)
            elif self.kind == "int8":
                row = rng.integers(-128, 128, (heads, dim)).astype(np.int8)
            else:
                row = Array.of(rng.normal(0, 1, (heads, dim)), self.dtype).data
            if self.slot_scales:
                sizes = rng.choice([0, 2e-7, 1e-4, 0.01, 0.02, 1], heads, p=[0.05, 0.05, 0.05, 0.4, 0.4, 0.05])
                self.slot_scales[index][block, :, slot] = sizes if index else np.minimum(sizes, 0.02)
            if self.layout == "xpack" and index == 0:
                self.refs[0][block, :, :, slot] = row.reshape(heads, -1, self.refs[0].shape[4])
            else:
                (self.keys, self.values)[index][block, :, slot] = row

    def read(self, index: int) -> np.ndarray:
        """What keys (0) or values (1) mean, scales included."""
        scale = (self.key_scale, self.value_scale)[index]
        numbers = decoded(self.side(index), self.dtype, self.kind)
        if self.slot_scales:
            return numbers * self.slot_scales[index].astype(np.float64)[..., None]
        return numbers if scale is None else numbers * scale.astype(np.float64).reshape(1, -1, 1, 1)

    def handle(self) -> Any:
        code = {"auto": self.dtype, "int8": I8}.get(self.kind, U8)
        scales = [None if s is None else ref(s, F32) for s in (self.key_scale, self.value_scale)]
        if self.slot_scales:
            scales = [ref(s, F16) for s in self.slot_scales]
        return native.KvCache(ref(self.refs[0], code), ref(self.refs[1], code), self.kind, *scales)


def fill(rng: Any, cache: Cache, lens: list[int], window: int = 0, lowest: list[int] | None = None) -> np.ndarray:
    """Random numbers in slots that are used, and tables; every entry that must not be followed is garbage.

    `lowest`: how many keys the first query of each sequence could see without a window."""
    blocks, _, size, _ = cache.shape
    free = list(rng.permutation(blocks))
    longest = max(-(-n // size) for n in lens)
    tables = np.full((len(lens), longest + 1), 1 << 28, dtype=np.int32)
    for row, n in enumerate(lens):
        for place in range(-(-n // size)):
            if window and (place + 1) * size <= max(0, (lowest or lens)[row] - window):
                continue  # a block that no query sees has been given back
            tables[row, place] = free.pop()
            for slot in range(min(size, n - place * size)):
                cache.put(rng, int(tables[row, place]), slot)
    return tables


def dense(cache: Cache, table: np.ndarray, n: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    size = cache.shape[2]
    count = -(-n // size)
    known = np.where(table[:count] < cache.shape[0], table[:count], 0)
    sides = []
    for index in range(2):
        rows = cache.read(index)[known, head].reshape(-1, cache.shape[3])[:n]
        sides.append(np.where(np.isfinite(rows), rows, 0))
    return sides[0], sides[1]
