"""Makes the matrices that the extension's kernels multiply with: as stored, or packed in 8 or 4 bits.

| scheme | from a GGUF file, or from codes of 4 or 8 bits in safetensors (code_source) | from other safetensors |
|---|---|---|
| auto | the file's own bits, inputs rounded to 15 bits | as `none` |
| none | the file's own bits, inputs in float32: the results of dequantized weights | as stored, inputs in float32 |
| none, in bfloat16 | weights and inputs in bfloat16 | weights and inputs in bfloat16 |
| q8, q4 | rounded again | rounded |
| auto-a8, q8-a8, q4-a8 | as without -a8, with inputs rounded to 8 bits | |

Matrices in bfloat16 are packed, so that instructions that multiply it have their operands beside each other. Rounding
to q8 and q4 is that of GGUF's Q8_0 and Q4_0. The embedding, which is also the output projection of many models, and the
matrices that make keys and values of latents keep 8 bits. GGUF formats without a kernel are kept in blocks of one that
has, where these hold the same numbers (such as Q3_K in Q6_K); others (such as Q2_K) are rounded to 8 bits by `auto`,
and become float32 by `none`. A stack whose tensors are of several types, as K mixtures have, becomes several matrices.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from types import ModuleType

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import FLOATS, ROWS, BlockSource, CheckpointReader, WeightSource
from gpu_worker.models.packed.packed_weights import FORMATS, NativeMatrix, inputs_of, weights_of
from gpu_worker.models.packed.weight_memory import WeightMemory

PACKING = 8  # rises when the same checkpoint is packed to other bytes, or to another header
BLOCK = 32
GROUP_ROWS = 16
BY_ROWS = "q8 by rows"  # a scheme of single layers, with -a8: in 8 bits with one scale for each row
PIECE_VALUES = 2 << 20  # so many are converted at once: they stay in the caches, and no tensor is copied whole
DIGITS = re.compile(r"\d+")
HEADS = (".k_b_proj.weight", ".v_b_proj.weight")  # of latent attention, which every token reads whole
OUTER = ("model.embed_tokens.weight", "lm_head.weight")


class MatrixPacker:
    """Packs on all threads of the extension, a piece at a time, into `memory`."""

    def __init__(
        self,
        extension: ModuleType,
        source: WeightSource,
        checkpoint: CheckpointReader,
        scheme: str,
        dtype: torch.dtype,
        memory: WeightMemory,
    ) -> None:
        self._extension = extension
        self._source = source
        self._checkpoint = checkpoint
        self._scheme = weights_of(scheme)
        self._whole_scheme = scheme
        self._dtype = dtype
        self._memory = memory
        self._dtypes: dict[str, torch.dtype] = {}  # of tensors in floats, by their names without numbers

    def stack(self, names: list[str], shapes: list[tuple[int, ...]]) -> NativeMatrix:
        format_, own = self._format(names, shapes)
        if format_ == FLOATS:
            return self._plain(names, shapes)
        return self._repack(own, names, shapes, format_) if own else self._round(names, shapes, format_)

    def size(self, names: list[str], shapes: list[tuple[int, ...]]) -> int:
        """How many bytes `stack` would make. Of tensors in floats the type is that of others of their kind."""
        rows, columns = sum(rows for rows, _ in shapes), shapes[0][1]
        format_, _ = self._format(names, shapes)
        if format_ == FLOATS:
            dtype = self._plain_dtype([self._stored_dtype(name) for name in names])
            if not self._is_halved(dtype, columns):
                return rows * columns * dtype.itemsize
            format_ = "halves"
        found: int = self._extension.packed_bytes(format_, rows, columns)
        return found

    def _format(self, names: list[str], shapes: list[tuple[int, ...]]) -> tuple[str, BlockSource | None]:
        """That of a stack, or FLOATS; and the source whose blocks it has, if they are kept."""
        if any(columns % BLOCK for _, columns in shapes):
            return FLOATS, None
        if self._scheme == BY_ROWS:
            return ROWS, None
        if self._scheme in ("q8", "q4"):
            return "q8" if names[0] in OUTER or names[0].endswith(HEADS) else self._scheme, None
        if not isinstance(self._source, BlockSource) or (self._scheme == "none" and self._dtype == torch.bfloat16):
            return FLOATS, None
        formats = {self._source.block_format(name) for name in names}
        if len(formats) == 1 and not formats & {FLOATS, ""}:
            return formats.pop(), self._source
        return "q8" if self._scheme == "auto" and not formats & {FLOATS, ROWS} else FLOATS, None

    def split(self, names: list[str]) -> list[list[str]]:
        """The tensors of a stack by those that `stack` makes one matrix of: neighbours of one type, if it is kept.

        All matrices of a stack round their inputs alike: so one tensor in floats makes a single one, except by `none`,
        and so does one whose rows have one scale beside others: in floats, as no packed format holds both.
        """
        halves = self._scheme == "none" and self._dtype == torch.bfloat16
        if not isinstance(self._source, BlockSource) or self._scheme in ("q8", "q4") or halves:
            return [names]
        formats = {name: self._source.block_format(name) for name in names}
        if self._scheme == "auto" and len(set(formats.values())) > 1 and {FLOATS, ROWS} & set(formats.values()):
            return [names]
        kept = {name: "" if found == FLOATS else found for name, found in formats.items()}
        return [list(some) for _, some in groupby(names, kept.__getitem__)]

    def _plain(self, names: list[str], shapes: list[tuple[int, ...]]) -> NativeMatrix:
        """A plain matrix: in 16 bits if the tensors are stored so, which loses nothing and takes half the bytes."""
        parts = [self._checkpoint.read_stored(name, shape) for name, shape in zip(names, shapes, strict=True)]
        dtype = self._plain_dtype([part.dtype for part in parts])
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        if self._is_halved(dtype, columns):
            data = self._packed("halves", rows, columns)
            for place, values in self._pieces(parts, data, torch.bfloat16):
                self._extension.pack(place, values)
            return self._matrix(data, "halves", rows, columns)
        if len(parts) == 1 and parts[0].dtype == dtype:
            data = parts[0].contiguous()
        else:
            data = self._memory.allocate(rows * columns * dtype.itemsize).view(dtype).view(rows, columns)
            torch.cat([part.to(dtype) for part in parts], out=data)
        return self._matrix(data, FORMATS[dtype], rows, columns)

    def _plain_dtype(self, stored: list[torch.dtype]) -> torch.dtype:
        dtype = stored[0] if len(set(stored)) == 1 and stored[0] in FORMATS else torch.float32
        return self._dtype if self._dtype != torch.float32 and dtype == torch.float32 else dtype

    def _is_halved(self, dtype: torch.dtype, columns: int) -> bool:
        return dtype == self._dtype == torch.bfloat16 and columns % BLOCK == 0

    def _stored_dtype(self, name: str) -> torch.dtype:
        kind = DIGITS.sub("", name)
        if kind not in self._dtypes:
            self._dtypes[kind] = self._source.get(name).dtype
        return self._dtypes[kind]

    def _round(self, names: list[str], shapes: list[tuple[int, ...]], format_: str) -> NativeMatrix:
        parts = [self._checkpoint.read_stored(name, shape) for name, shape in zip(names, shapes, strict=True)]
        rows, columns = sum(rows for rows, _ in shapes), shapes[0][1]
        data = self._packed(format_, rows, columns)
        for place, values in self._pieces(parts, data, torch.float32):
            if format_ == ROWS:
                self._extension.repack(place, _rows(values), format_, *values.shape)
            else:
                self._extension.quantize(place, values, format_)
        return self._matrix(data, format_, rows, columns)

    def _repack(
        self, source: BlockSource, names: list[str], shapes: list[tuple[int, ...]], format_: str
    ) -> NativeMatrix:
        rows, columns = sum(rows for rows, _ in shapes), shapes[0][1]
        parts = []
        for name, shape in zip(names, shapes, strict=True):
            self._checkpoint.check_shape(name, source.shape(name), shape)
            parts.append(source.blocks(name))
            self._checkpoint.mark_read(name)
        data = self._packed(format_, rows, columns)
        for place, blocks in self._pieces(parts, data, torch.uint8):
            self._extension.repack(place, blocks, format_, len(blocks), columns)
        return self._matrix(data, format_, rows, columns)

    def _packed(self, format_: str, rows: int, columns: int) -> Tensor:
        return self._memory.allocate(self._extension.packed_bytes(format_, rows, columns))

    def _matrix(self, data: Tensor, format_: str, rows: int, columns: int) -> NativeMatrix:
        weight = self._extension.Weight(data, format_, rows, columns, inputs=inputs_of(format_, self._whole_scheme))
        return NativeMatrix(data, weight)

    def _pieces(self, parts: Sequence[Tensor], packed: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of the parts in order, a few groups at a time, and where in `packed` they go."""
        starts = [0, *accumulate(len(part) for part in parts)]
        num_rows = starts.pop()
        group_bytes = len(packed) // -(-num_rows // GROUP_ROWS)
        step = max(1, PIECE_VALUES // parts[0].shape[1] // GROUP_ROWS) * GROUP_ROWS
        for first in range(0, num_rows, step):
            end = min(first + step, num_rows)
            found = [
                part[max(0, first - start) : end - start].to(dtype)
                for start, part in zip(starts, parts, strict=True)
                if start < end and first < start + len(part)
            ]
            rows = found[0] if len(found) == 1 else torch.cat(found)
            yield packed[first // GROUP_ROWS * group_bytes : -(-end // GROUP_ROWS) * group_bytes], rows


def _rows(values: Tensor) -> Tensor:
    """Blocks of ROWS: of each row its scale in float32, and its numbers rounded to 8 bits."""
    scales = values.abs().amax(1, keepdim=True).float() / 127
    codes = (values / scales.where(scales > 0, 1)).round().to(torch.int8)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), 1)
