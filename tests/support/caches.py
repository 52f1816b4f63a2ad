"""Caches of every layout and type for tests: written and read element by element with torch."""

import random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BYTES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
KINDS = (*FLOATS, *BYTES, "int8_paged")
LAYOUTS = ("hnd", "nhd", "xpack", "apart")


def to_eight_bits(values: Tensor, kind: str) -> Tensor:
    """Rounded to nearest, ties to even; saturated."""
    if kind == "int8":
        return values.round().clamp(-127, 127).nan_to_num(-127).to(torch.int8)
    return values.clamp(*(-448, 448) if kind == "fp8_e4m3" else (-57344, 57344)).to(BYTES[kind])


class Cache:
    """[num_blocks, heads, 2, block_size, dim] in some form, full of values that no op may read."""

    def __init__(self, rng: random.Random, layout: str, kind: str, blocks: int, heads: int, size: int, dim: int):
        self.layout, self.kind, self.size, self.dim = layout, kind, size, dim
        self.dtype = FLOATS.get(kind) or BYTES[kind.removesuffix("_paged")]
        self.scales = None
        if kind in ("fp8_e4m3", "fp8_e5m2", "int8") and (kind == "int8" or rng.random() < 0.5):
            count = rng.choice([1, heads])
            self.scales = [torch.rand(count) * 0.05 + 0.01 for _ in range(2)]
        paged = kind == "int8_paged"
        if paged:
            self.layout = layout = "hnd"
        x = 16 // self.dtype.itemsize
        shapes = {
            "hnd": [(blocks, heads, 2, size, dim + 2 * paged)],
            "nhd": [(blocks, 2, size, heads, dim)],
            "xpack": [(blocks, heads, dim // x, size, x), (blocks, heads, dim, size)],
            "apart": [(blocks, size, heads, dim), (blocks, size, heads, dim)],
        }
        self.parts = [torch.empty(shape, dtype=self.dtype) for shape in shapes[layout]]
        for part in self.parts:
            part.view(torch.uint8).fill_(255)  # NaN, but for int8

    def handle(self, extension: ModuleType) -> object:
        """The argument that ops take for this cache."""
        if self.scales is None and self.layout in ("hnd", "nhd"):
            return self._given()[0]
        return extension.KvCache(*self._typed(extension))

    def _given(self) -> list[Tensor]:
        order = {"nhd": (0, 3, 1, 2, 4), "apart": (0, 2, 1, 3)}.get(self.layout)
        return [part.permute(order) for part in self.parts] if order else self.parts

    def _typed(self, extension: ModuleType) -> list[object]:
        parts = self._given()
        kind = "auto"
        if self.kind in BYTES and self.kind != "int8":  # as vLLM has them
            parts, kind = [part.view(torch.uint8) for part in parts], self.kind
        values = [None] if len(parts) == 1 else []
        return [*parts, *values, kind, *(self.scales or [])]

    def numbers(self, side: int) -> Tensor:
        """A view: elements of keys or values as [num_blocks, heads, block_size, dim]; xpack's are a copy."""
        if self.layout == "xpack":
            part = self.parts[side]
            if side:
                return part.transpose(2, 3)
            return part.permute(0, 1, 3, 2, 4).reshape(*part.shape[:2], self.size, self.dim)
        if self.kind == "int8_paged":
            pages = self.parts[0].flatten(3)[..., : self.size * self.dim]
            return pages.unflatten(-1, (self.size, self.dim))[:, :, side]
        return self._given()[0][:, :, side] if self.layout in ("hnd", "nhd") else self._given()[side]

    def slot_scales(self, side: int) -> Tensor:
        return self.parts[0].flatten(3)[..., self.size * self.dim :].view(torch.float16)[:, :, side]

    def put(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Stores [heads, dim] of each as writing is defined."""
        block, place = divmod(slot, self.size)
        for side, given in enumerate((keys.float(), values.float())):
            row = given
            if self.kind == "int8_paged":
                scale = (row.abs().amax(1) / 127).clamp(max=65504).half()
                self.slot_scales(side)[block, :, place] = scale
                row = row / torch.where(scale > 0, scale.float(), torch.inf)[:, None]
            elif self.scales is not None:
                row = row / self.scales[side][:, None]
            row = to_eight_bits(row, self.kind.removesuffix("_paged")) if self.dtype.itemsize == 1 else row
            row = row.to(self.dtype)
            if self.layout == "xpack" and side == 0:
                self.parts[0][block, :, :, place] = row.unflatten(1, (-1, self.parts[0].shape[4]))
            else:
                self.numbers(side)[block, :, place] = row

    def read(self) -> Tensor:
        """What is stored, float64 [num_blocks, heads, 2, block_size, dim]."""
        sides = []
        for side in range(2):
            values = self.numbers(side).double()
            if self.kind == "int8_paged":
                values = values * self.slot_scales(side).double()[..., None]
            elif self.scales is not None:
                values = values * self.scales[side].double()[:, None, None]
            sides.append(values)
        return torch.stack(sides, dim=2)

    def moved(self, order: Tensor) -> "Cache":
        """A copy with block i at order[i]."""
        other = object.__new__(Cache)
        other.__dict__.update(self.__dict__)
        other.parts = [torch.empty_like(part) for part in self.parts]
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            theirs.view(torch.uint8)[order] = mine.view(torch.uint8)
        return other

    def bytes(self) -> list[Tensor]:
        return [part.view(torch.uint8).clone() for part in self.parts]

    def attend(self, ops: Any, queries: Tensor, q_lens: list[int], kv_lens: list[int], tables: Tensor, **how) -> Tensor:
        """What `paged_attention` makes of the last queries of each sequence."""
        cu_q, lens = torch.tensor([0, *q_lens]).cumsum(0).int(), torch.tensor(kv_lens, dtype=torch.int32)
        out = torch.full(queries.shape, float("nan"), dtype=queries.dtype)
        ops.paged_attention(out, queries, self.handle(ops), cu_q, lens, tables, **how)
        return out


def filled(rng: random.Random, layout: str, kind: str, blocks: int, heads: int, size: int, dim: int) -> Cache:
    """Each slot holds something, of any size that does not overflow."""
    cache = Cache(rng, layout, kind, blocks, heads, size, dim)
    for part in cache.parts:
        if cache.dtype.itemsize > 1:
            part.copy_(torch.randn(part.shape))
        else:
            part.view(torch.uint8).random_(0, 256 if "int8" in kind else 90)
            part.view(torch.uint8).bitwise_or_(torch.randint(0, 2, part.shape, dtype=torch.uint8) << 7)
    for side in range(2 * (kind == "int8_paged")):
        cache.slot_scales(side).copy_(torch.rand(blocks, heads, size) / 50)
    return cache
