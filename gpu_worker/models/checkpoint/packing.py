"""Makes the matrices that the extension's kernels multiply with: as stored, or packed in 4 to 8 bits.

| scheme | from a GGUF file | from safetensors |
|---|---|---|
| auto | the file's own bits, inputs rounded to 15 bits | as `none` |
| none | the file's own bits, inputs in float32: the results of dequantized weights | as stored, inputs in float32 |
| none, in bfloat16 | weights and inputs in bfloat16 | weights and inputs in bfloat16 |
| q8, q4 | rounded again | rounded |

Matrices in bfloat16 are packed, so that instructions that multiply it have their operands beside each other. Rounding
to q8 and q4 is that of GGUF's Q8_0 and Q4_0. The embedding, which is also the output projection of many models, keeps
8 bits. GGUF formats without a kernel (such as Q5_0) are rounded to 8 bits by `auto`, and become float32 by `none`.
A stack whose tensors are of several types, as K mixtures have, becomes several matrices.
"""

import logging
import mmap
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.gguf_tensors import GgufSource
from gpu_worker.models.checkpoint.weights import CheckpointReader, WeightSource
from octavo.model_files.gguf import TensorType
from octavo.model_files.gguf_support import FLOATS

PAGE = 2 << 20
SLAB = 64 << 20
LINE = 64  # bytes; every piece begins at a multiple of it


class HugePageAllocator:
    """Hands out pieces of slabs, one after the other. A slab lives as long as any piece of it.

    A step reads all weights once. With pages of 4 KiB, looking the pages up takes a third of the bandwidth
    (docs/decisions/native.md), so this memory lies in huge pages where the system has them.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """`size` bytes, all zero."""
        taken = -(-size // LINE) * LINE
        if taken > len(self._rest):
            self._rest = _slab(max(taken, SLAB))
        piece, self._rest = self._rest[:size], self._rest[taken:]
        return piece


def _slab(size: int) -> Tensor:
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -everything.data_ptr() % PAGE
    return everything[skipped : skipped + size]


log = logging.getLogger(__name__)

SCHEMES = ("auto", "none", "q8", "q4")
BLOCK = 32
FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
KERNELS = {  # GGUF's types whose bits are kept, and what the extension calls them
    TensorType.Q8_0: "q8",
    TensorType.Q4_0: "q4",
    TensorType.Q4_1: "q4_mins",
    TensorType.Q4_K: "q4_k",
    TensorType.Q5_K: "q5_k",
    TensorType.Q6_K: "q6_k",
}
OUTER = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True, eq=False)
class NativeMatrix:
    """A matrix [rows, cols]; `weight` refers to the memory of `data`."""

    data: Tensor
    weight: Any  # the extension's Weight


class MatrixPacker:
    def __init__(
        self, extension: ModuleType, source: WeightSource, checkpoint: CheckpointReader, scheme: str, dtype: torch.dtype
    ) -> None:
        self._extension = extension
        self._source = source
        self._checkpoint = checkpoint
        self._scheme = scheme
        self._dtype = dtype
        self._memory = HugePageAllocator()
        self.formats: Counter[str] = Counter()

    def stack(self, names: list[str], shapes: list[tuple[int, ...]]) -> NativeMatrix:
        blocked = all(columns % BLOCK == 0 for _, columns in shapes)
        if self._scheme in ("q8", "q4") and blocked:
            format_ = "q8" if names[0] in OUTER else self._scheme
            return self._round(names, shapes, format_)
        if isinstance(self._source, GgufSource) and blocked:
            kinds = {self._source.kind(name) for name in names}
            if self._scheme == "none" and self._dtype == torch.bfloat16:
                return self._plain(names, shapes)
            own = {KERNELS.get(kind) for kind in kinds}
            if len(own) == 1 and (kept := own.pop()):
                return self._repack(self._source, names, shapes, kept)
            if self._scheme == "auto" and not kinds & set(FLOATS):
                return self._round(names, shapes, "q8")
        return self._plain(names, shapes)

    def split(self, names: list[str]) -> list[list[str]]:
        """The tensors of a stack by those that `stack` makes one matrix of: neighbours of one type, if it is kept.

        All matrices of a stack round their inputs alike: so one tensor in floats makes a single one, except by `none`.
        """
        halves = self._scheme == "none" and self._dtype == torch.bfloat16
        if not isinstance(self._source, GgufSource) or self._scheme in ("q8", "q4") or halves:
            return [names]
        kinds = {name: self._source.kind(name) for name in names}
        if self._scheme == "auto" and set(kinds.values()) & set(FLOATS):
            return [names]
        return [list(some) for _, some in groupby(names, lambda name: KERNELS.get(kinds[name]))]

    def describe(self) -> str:
        """The formats of the matrices, and what their inputs are rounded to."""
        return f"{', '.join(sorted(self.formats))}; inputs {', '.join(sorted(self._roundings()))}"

    def arithmetic(self) -> str:
        """The facts of `describe` without spaces, for a class of numerics."""
        return f"{'+'.join(sorted(self.formats))}/in={'+'.join(sorted(self._roundings())).replace(' ', '-')}"

    def _roundings(self) -> set[str]:
        return {
            "bfloat16" if format_ == "halves" else "float32" if self._exact(format_) else "15 bits"
            for format_ in self.formats
        }

    def _exact(self, format_: str) -> bool:
        """Whether products with this format take inputs as they are."""
        return format_ in FORMATS.values() or (self._scheme == "none" and format_ != "halves")

    def _plain(self, names: list[str], shapes: list[tuple[int, ...]]) -> NativeMatrix:
        """A plain matrix: in 16 bits if the tensors are stored so, which loses nothing and takes half the bytes."""
        parts = [self._checkpoint.read_stored(name, shape) for name, shape in zip(names, shapes, strict=True)]
        stored = {part.dtype for part in parts}
        dtype = parts[0].dtype if len(stored) == 1 and parts[0].dtype in FORMATS else torch.float32
        if self._dtype != torch.float32 and dtype == torch.float32:
            dtype = self._dtype
        if dtype == self._dtype == torch.bfloat16 and parts[0].shape[1] % BLOCK == 0:
            return self._halves(torch.cat([part.to(dtype) for part in parts]))
        if len(parts) == 1 and parts[0].dtype == dtype:
            data = parts[0].contiguous()
        else:
            rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
            data = self._memory.allocate(rows * columns * dtype.itemsize).view(dtype).view(rows, columns)
            torch.cat([part.to(dtype) for part in parts], out=data)
        return self._matrix(data, FORMATS[dtype], *data.shape)

    def _halves(self, values: Tensor) -> NativeMatrix:
        data = self._packed("halves", *values.shape)
        self._extension.pack(data, values)
        return self._matrix(data, "halves", *values.shape)

    def _round(self, names: list[str], shapes: list[tuple[int, ...]], format_: str) -> NativeMatrix:
        parts = [self._checkpoint.read_stored(name, shape).float() for name, shape in zip(names, shapes, strict=True)]
        values = torch.cat(parts)
        data = self._packed(format_, *values.shape)
        self._extension.quantize(data, values, format_)
        return self._matrix(data, format_, *values.shape)

    def _repack(
        self, source: GgufSource, names: list[str], shapes: list[tuple[int, ...]], format_: str
    ) -> NativeMatrix:
        rows, columns = sum(rows for rows, _ in shapes), shapes[0][1]
        parts = []
        for name, shape in zip(names, shapes, strict=True):
            self._checkpoint.check_shape(name, source.shape(name), shape)
            parts.append(source.blocks(name))
            self._checkpoint.mark_read(name)
        data = self._packed(format_, rows, columns)
        self._extension.repack(data, torch.cat(parts), format_, rows, columns)
        return self._matrix(data, format_, rows, columns)

    def _packed(self, format_: str, rows: int, columns: int) -> Tensor:
        return self._memory.allocate(self._extension.packed_bytes(format_, rows, columns))

    def _matrix(self, data: Tensor, format_: str, rows: int, columns: int) -> NativeMatrix:
        self.formats[format_] += 1
        weight = self._extension.Weight(data, format_, rows, columns, exact=self._exact(format_))
        return NativeMatrix(data, weight)
