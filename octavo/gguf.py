"""Reads GGUF files (versions 2 and 3) with nothing but the standard library.

The file is memory-mapped; opening it walks the header once and decodes no arrays, so a vocabulary costs nothing until
it is asked for. Every count, length and offset is checked against the file's size before it is used: a malformed file
raises MalformedGguf and never allocates more than the file could hold.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo.errors import MalformedGguf

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 2
MAX_NAME_BYTES = 65535

Value = bool | int | float | str | list["Value"]


class ValueType(IntEnum):
    """The types of metadata values."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


class TensorType(IntEnum):
    """How a tensor's numbers are stored. Those in BLOCK_SIZES can be located; gpu_worker decodes a subset."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    BF16 = 30


# Numbers per quantization block, and its bytes.
BLOCK_SIZES: Mapping[TensorType, tuple[int, int]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.F64: (1, 8),
    TensorType.I8: (1, 1),
    TensorType.I16: (1, 2),
    TensorType.I32: (1, 4),
    TensorType.I64: (1, 8),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q8_1: (32, 36),
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
    TensorType.Q8_K: (256, 292),
}

_FORMATS = {
    ValueType.U8: "B",
    ValueType.I8: "b",
    ValueType.U16: "H",
    ValueType.I16: "h",
    ValueType.U32: "I",
    ValueType.I32: "i",
    ValueType.F32: "f",
    ValueType.BOOL: "B",
    ValueType.U64: "Q",
    ValueType.I64: "q",
    ValueType.F64: "d",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in the order of torch and numpy: the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # from the start of the file
    num_bytes: int


class _Cursor:
    """A position in the mapped file that cannot leave it."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.end = len(data)
        self.pos = 0
        self.name = name

    def fail(self, what: str) -> MalformedGguf:
        return MalformedGguf(f"{self.name}: {what} (at byte {self.pos} of {self.end})")

    def advance(self, num_bytes: int) -> int:
        """The position before `num_bytes` more bytes, all of which exist."""
        start = self.pos
        if num_bytes > self.end - start:
            raise self.fail(f"{num_bytes} bytes expected, the file ends before")
        self.pos = start + num_bytes
        return start

    def u32(self) -> int:
        value: int = _U32.unpack_from(self.data, self.advance(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self.data, self.advance(8))[0]
        return value

    def string(self) -> str:
        length = self.u64()
        start = self.advance(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"a string is not UTF-8: {error}") from error

    def name_string(self, what: str) -> str:
        length = _U64.unpack_from(self.data, self.advance(8))[0]
        self.pos -= 8
        if length > MAX_NAME_BYTES:
            raise self.fail(f"{what} of {length} bytes")
        return self.string()

    def value_type(self) -> ValueType:
        number = self.u32()
        try:
            return ValueType(number)
        except ValueError:
            raise self.fail(f"unknown value type {number}") from None

    def count(self, kind: ValueType) -> int:
        """An array's length, which the rest of the file can hold."""
        count = self.u64()
        smallest = {ValueType.STRING: 8, ValueType.ARRAY: 12}.get(kind) or struct.calcsize(_FORMATS[kind])
        if count * smallest > self.end - self.pos:
            raise self.fail(f"an array of {count} values does not fit the file")
        return count

    def skip(self, kind: ValueType, depth: int = 0) -> None:
        if kind == ValueType.STRING:
            self.advance(self.u64())
        elif kind == ValueType.ARRAY:
            self._skip_array(depth)
        else:
            self.advance(struct.calcsize(_FORMATS[kind]))

    def _skip_array(self, depth: int) -> None:
        if depth >= MAX_ARRAY_DEPTH:
            raise self.fail("arrays are nested too deep")
        kind = self.value_type()
        count = self.count(kind)
        if kind == ValueType.STRING:
            self._skip_strings(count)
        elif kind == ValueType.ARRAY:
            for _ in range(count):
                self._skip_array(depth + 1)
        else:
            self.advance(count * struct.calcsize(_FORMATS[kind]))

    def _skip_strings(self, count: int) -> None:
        """The hot loop of opening a file: vocabularies have hundreds of thousands of strings."""
        unpack, data, pos, last = _U64.unpack_from, self.data, self.pos, self.end - 8
        for _ in range(count):
            if pos > last:
                raise self.fail(f"an array of {count} strings leaves the file")
            pos += 8 + unpack(data, pos)[0]
        if pos > self.end:
            raise self.fail(f"an array of {count} strings leaves the file")
        self.pos = pos

    def value(self, kind: ValueType) -> Value:
        if kind == ValueType.STRING:
            return self.string()
        if kind == ValueType.ARRAY:
            return self._array()
        return self._scalars(kind, 1)[0]

    def _array(self) -> list[Value]:
        kind = self.value_type()
        count = self.count(kind)
        if kind == ValueType.STRING:
            return [self.string() for _ in range(count)]
        if kind == ValueType.ARRAY:
            return [self._array() for _ in range(count)]
        return self._scalars(kind, count)

    def _scalars(self, kind: ValueType, count: int) -> list[Value]:
        layout = f"<{count}{_FORMATS[kind]}"
        values = struct.unpack_from(layout, self.data, self.advance(struct.calcsize(layout)))
        if kind == ValueType.BOOL:
            if any(value > 1 for value in values):
                raise self.fail("a truth value is neither 0 nor 1")
            return [bool(value) for value in values]
        return list(values)


class Metadata(Mapping[str, Value]):
    """The file's key-value pairs. A value is decoded, and a malformed one refused, when it is first asked for."""

    def __init__(self, cursor: _Cursor, spans: dict[str, tuple[ValueType, int]]) -> None:
        self._cursor = cursor
        self._spans = spans
        self._decoded: dict[str, Value] = {}

    def __getitem__(self, key: str) -> Value:
        if key not in self._decoded:
            kind, self._cursor.pos = self._spans[key]
            self._decoded[key] = self._cursor.value(kind)
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._spans

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer at `key`. Missing without a default, or of another type: MalformedGguf."""
        if key not in self and default is not None:
            return default
        return int(self._required(key, (int,), "an integer"))  # type: ignore[arg-type]

    def number(self, key: str, default: float | None = None) -> float:
        """The number at `key`, as `integer`."""
        if key not in self and default is not None:
            return default
        return float(self._required(key, (int, float), "a number"))  # type: ignore[arg-type]

    def string(self, key: str, default: str | None = None) -> str:
        """The string at `key`, as `integer`."""
        if key not in self and default is not None:
            return default
        return str(self._required(key, (str,), "a string"))

    def strings(self, key: str) -> list[str]:
        """The array of strings at `key`, as `integer`."""
        values = self._required(key, (list,), "an array")
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise MalformedGguf(f"{self._cursor.name}: {key} is not an array of strings")
        return values  # type: ignore[return-value]

    def integers(self, key: str) -> list[int]:
        """The array of integers at `key`, as `integer`."""
        values = self._required(key, (list,), "an array")
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            raise MalformedGguf(f"{self._cursor.name}: {key} is not an array of integers")
        return values  # type: ignore[return-value]

    def _required(self, key: str, kinds: tuple[type, ...], what: str) -> Value:
        if key not in self:
            raise MalformedGguf(f"{self._cursor.name}: {key} is missing")
        value = self[key]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise MalformedGguf(f"{self._cursor.name}: {key} is {type(value).__name__}, not {what}")
        return value


class GgufFile:
    """An open GGUF file: `metadata`, `tensors` by name, and the bytes of each tensor."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        cursor = _Cursor(self._map, self.path.name)
        self.version = _read_version(cursor)
        num_tensors, num_values = cursor.u64(), cursor.u64()
        self.metadata = _read_metadata(cursor, num_values)
        header_end = cursor.pos
        self.alignment = _alignment(self.metadata, cursor)
        cursor.pos = header_end
        self.tensors = _read_tensors(cursor, num_tensors, self.alignment)

    def tensor_bytes(self, name: str) -> memoryview:
        """A read-only view of the tensor's bytes; it stays valid after close()."""
        info = self.tensors[name]
        return memoryview(self._map)[info.offset : info.offset + info.num_bytes]

    def close(self) -> None:
        """Drops the mapping, once no view of it is left."""
        try:
            self._map.close()
        except BufferError:
            pass  # a view is still in use; the mapping goes with the last of them

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        file.seek(0, 2)
        if file.tell() < 24:
            raise MalformedGguf(f"{path.name}: {file.tell()} bytes are too few for a GGUF header")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_version(cursor: _Cursor) -> int:
    start = cursor.advance(4)
    if cursor.data[start : start + 4] != MAGIC:
        raise cursor.fail("this is not a GGUF file")
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise cursor.fail("big-endian GGUF files are not supported")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version} is not supported (2 and 3 are)")
    return version


def _read_metadata(cursor: _Cursor, num_values: int) -> Metadata:
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


def _alignment(metadata: Metadata, cursor: _Cursor) -> int:
    alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
    if not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment: {alignment} is not a power of two")
    return alignment


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
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
        tensors[info.name] = TensorInfo(info.name, info.shape, info.type, offset, info.num_bytes)
    return tensors


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.name_string("a tensor's name")
    num_dimensions = cursor.u32()
    if num_dimensions > MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(cursor.u64() for _ in range(num_dimensions))[::-1]
    number = cursor.u32()
    try:
        kind = TensorType(number)
    except ValueError:
        raise cursor.fail(f"tensor {name!r} has unknown type {number}") from None
    block, block_bytes = BLOCK_SIZES[kind]
    num_values = prod(shape)
    if num_values and shape and shape[-1] % block:
        raise cursor.fail(
            f"rows of tensor {name!r} are not whole {kind.name} blocks: {shape[-1]} is no multiple of {block}"
        )
    offset = cursor.u64()
    return TensorInfo(name, shape, kind, offset, num_values // block * block_bytes)
