"""Reads GGUF files (versions 2 and 3) with nothing but the standard library.

The file is memory-mapped. Opening it walks the header once and decodes no arrays, so a vocabulary costs nothing until
a caller asks for it. Every count, length and offset is checked against the file's size before it is used: a malformed
file raises MalformedGguf, and never makes the reader allocate more than the file could hold.
"""

import mmap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from pathlib import Path
from typing import Self

from octavo.model_files.gguf_metadata import Cursor, Metadata, ValueType
from octavo.model_files.gguf_parts import MOST_PARTS, part_paths
from octavo.request.errors import MalformedGguf

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4


class TensorType(IntEnum):
    """How a tensor's numbers are stored: in blocks of so many numbers, of so many bytes.

    octavo.model_files.gguf_support says which types octavo serves.
    """

    block: int
    num_bytes: int

    def __new__(cls, number: int, block: int = 1, num_bytes: int = 1) -> Self:
        member = int.__new__(cls, number)
        member._value_, member.block, member.num_bytes = number, block, num_bytes
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 36
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18


# Types that llama.cpp has removed. Their numbers are not used again.
REMOVED_TYPES: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in the order of torch and numpy: the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # from the start of its file
    num_bytes: int
    part: int = 0  # which of the model's files it is in


class GgufFile:
    """An open GGUF file: `metadata`, `tensors` by name, and the bytes of each tensor.

    The first of several parts opens the others, which lie beside it, and has their tensors. `paths` are all the files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.paths = [self.path]
        self._maps: list[mmap.mmap] = []
        self.metadata, self.tensors = self._open(self.path)
        self.num_parts = self.metadata.integer("split.count", 1)
        if self.num_parts > 1 and self.metadata.integer("split.no", 0) == 0:
            self._open_others()

    def _open(self, path: Path) -> tuple[Metadata, dict[str, TensorInfo]]:
        with path.open("rb") as file:
            if (num_bytes := file.seek(0, 2)) < 24:
                raise MalformedGguf(f"{path.name}: {num_bytes} bytes are too few for a GGUF header")
            self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        cursor = Cursor(self._maps[-1], path.name)
        _check_version(cursor)
        num_tensors, num_values = cursor.u64(), cursor.u64()
        metadata = _read_metadata(cursor, num_values)
        header_end = cursor.pos
        alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
        if not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise cursor.fail(f"general.alignment: {alignment} is not a power of two")
        cursor.pos = header_end
        return metadata, _read_tensors(cursor, num_tensors, alignment, len(self._maps) - 1)

    def _open_others(self) -> None:
        """Opens the second and later parts. MalformedGguf if one is missing or belongs to another model."""
        name, count = self.path.name, self.num_parts
        self.paths = part_paths(self.path, count) if count <= MOST_PARTS else []
        if not self.paths:
            raise MalformedGguf(f"{name} is the first of {count} parts, but is not named …-00001-of-{count:05}.gguf")
        for number, path in enumerate(self.paths[1:], start=1):
            try:
                metadata, tensors = self._open(path)
            except FileNotFoundError:
                raise MalformedGguf(f"{name} is the first of {count} parts, and {path.name} is not beside it") from None
            if (metadata.integer("split.no", -1), metadata.integer("split.count", -1)) != (number, count):
                raise MalformedGguf(f"{path.name} says that it is another part than {number + 1} of {count}")
            if twice := sorted(self.tensors.keys() & tensors.keys()):
                raise MalformedGguf(f"{path.name}: tensor {twice[0]!r} is in another part, too")
            self.tensors |= tensors
        expected = self.metadata.integer("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise MalformedGguf(
                f"{name}: its {count} parts have {len(self.tensors)} tensors, and {expected} were split"
            )

    def tensor_bytes(self, name: str) -> memoryview:
        """A read-only view of the tensor's bytes; it stays valid after close()."""
        info = self.tensors[name]
        return memoryview(self._maps[info.part])[info.offset : info.offset + info.num_bytes]

    def release(self, name: str) -> None:
        """Takes the tensor's pages out of this process; a later read gets them again."""
        info, page = self.tensors[name], mmap.PAGESIZE
        begin, end = info.offset // page * page, -(-(info.offset + info.num_bytes) // page) * page
        if hasattr(mmap, "MADV_DONTNEED") and info.num_bytes:
            self._maps[info.part].madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def close(self) -> None:
        """Unmaps the files, as soon as no view of them is left."""
        for each in self._maps:
            with suppress(BufferError):  # a view is still in use: the file is unmapped with the last one
                each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_version(cursor: Cursor) -> None:
    start = cursor.advance(4)
    if cursor.data[start : start + 4] != MAGIC:
        raise cursor.fail("this is not a GGUF file")
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise cursor.fail("big-endian GGUF files are not supported")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version} is not supported (2 and 3 are)")


def _read_metadata(cursor: Cursor, num_values: int) -> Metadata:
    if num_values * 13 > cursor.end - cursor.pos:
        raise cursor.fail(f"{num_values} metadata values do not fit the file")
    spans: dict[str, tuple[ValueType, int]] = {}
    for _ in range(num_values):
        key = cursor.name_string("a metadata key")
        if key in spans:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        kind = cursor.value_type()
        spans[key] = (kind, cursor.pos)
        cursor.skip(kind)
    return Metadata(cursor, spans)


def _read_tensors(cursor: Cursor, num_tensors: int, alignment: int, part: int) -> dict[str, TensorInfo]:
    if num_tensors * 32 > cursor.end - cursor.pos:
        raise cursor.fail(f"{num_tensors} tensors do not fit the file")
    relative = [_read_tensor(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in relative:
        offset = data_start + info.offset
        if info.name in tensors:
            raise cursor.fail(f"tensor {info.name!r} appears twice")
        if info.offset % alignment:
            raise cursor.fail(f"tensor {info.name!r} is not aligned to {alignment} bytes")
        if offset + info.num_bytes > cursor.end:
            raise cursor.fail(f"tensor {info.name!r} ends at byte {offset + info.num_bytes}, after the file's end")
        tensors[info.name] = TensorInfo(info.name, info.shape, info.type, offset, info.num_bytes, part)
    _check_apart(tensors.values(), cursor)
    return tensors


def _check_apart(tensors: Iterable[TensorInfo], cursor: Cursor) -> None:
    """No two tensors share bytes: a small file could otherwise hold a model of any size."""
    end, before = 0, ""
    for info in sorted((info for info in tensors if info.num_bytes), key=lambda info: info.offset):
        if info.offset < end:
            raise cursor.fail(f"tensors {before!r} and {info.name!r} overlap")
        end, before = info.offset + info.num_bytes, info.name


def _read_tensor(cursor: Cursor) -> TensorInfo:
    name = cursor.name_string("a tensor's name")
    num_dimensions = cursor.u32()
    if num_dimensions > MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(cursor.u64() for _ in range(num_dimensions))[::-1]
    number = cursor.u32()
    try:
        kind = TensorType(number)
    except ValueError:
        removed = REMOVED_TYPES.get(number)
        what = f"type {removed}, which llama.cpp has removed" if removed else f"unknown type {number}"
        raise cursor.fail(f"tensor {name!r} has {what}") from None
    num_values = prod(shape)
    if num_values and shape and shape[-1] % kind.block:
        raise cursor.fail(
            f"rows of tensor {name!r} are not whole {kind.name} blocks: {shape[-1]} is no multiple of {kind.block}"
        )
    offset = cursor.u64()
    return TensorInfo(name, shape, kind, offset, num_values // kind.block * kind.num_bytes)
