"""The metadata of a GGUF file: keys and values, read from the mapped file without ever reading past its end."""

import mmap
import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, Self, TypeVar

from octavo.request.errors import MalformedGguf

MAX_ARRAY_DEPTH = 2
MAX_NAME_BYTES = 65535

T = TypeVar("T")
MetadataValue = bool | int | float | str | list["MetadataValue"]


class ValueType(IntEnum):
    """The types of metadata values, and how `struct` calls those of a fixed size."""

    layout: str

    def __new__(cls, number: int, layout: str = "") -> Self:
        member = int.__new__(cls, number)
        member._value_, member.layout = number, layout
        return member

    U8 = 0, "B"
    I8 = 1, "b"
    U16 = 2, "H"
    I16 = 3, "h"
    U32 = 4, "I"
    I32 = 5, "i"
    F32 = 6, "f"
    BOOL = 7, "B"
    STRING = 8
    ARRAY = 9
    U64 = 10, "Q"
    I64 = 11, "q"
    F64 = 12, "d"


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in the mapped file. It raises MalformedGguf instead of leaving the file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.end = len(data)
        self.pos = 0
        self.name = name

    def fail(self, what: str) -> MalformedGguf:
        return MalformedGguf(f"{self.name}: {what} (at byte {self.pos} of {self.end})")

    def advance(self, num_bytes: int) -> int:
        """Moves on by `num_bytes`, all of which exist; returns the position before them."""
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
        """The length of an array. The rest of the file is large enough to hold the array."""
        count = self.u64()
        smallest = {ValueType.STRING: 8, ValueType.ARRAY: 12}.get(kind) or struct.calcsize(kind.layout)
        if count * smallest > self.end - self.pos:
            raise self.fail(f"an array of {count} values does not fit the file")
        return count

    def skip(self, kind: ValueType, depth: int = 0) -> None:
        if kind == ValueType.STRING:
            self.advance(self.u64())
        elif kind == ValueType.ARRAY:
            self._skip_array(depth)
        else:
            self.advance(struct.calcsize(kind.layout))

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
            self.advance(count * struct.calcsize(kind.layout))

    def _skip_strings(self, count: int) -> None:
        """Skips strings in one loop over local variables: a vocabulary has hundreds of thousands of them."""
        unpack, data, pos, last = _U64.unpack_from, self.data, self.pos, self.end - 8
        for _ in range(count):
            if pos > last:
                raise self.fail(f"an array of {count} strings leaves the file")
            pos += 8 + unpack(data, pos)[0]
        if pos > self.end:
            raise self.fail(f"an array of {count} strings leaves the file")
        self.pos = pos

    def value(self, kind: ValueType) -> MetadataValue:
        if kind == ValueType.STRING:
            return self.string()
        if kind == ValueType.ARRAY:
            return self._array()
        return self._scalars(kind, 1)[0]

    def _array(self) -> list[MetadataValue]:
        kind = self.value_type()
        count = self.count(kind)
        if kind == ValueType.STRING:
            return [self.string() for _ in range(count)]
        if kind == ValueType.ARRAY:
            return [self._array() for _ in range(count)]
        return self._scalars(kind, count)

    def _scalars(self, kind: ValueType, count: int) -> list[MetadataValue]:
        layout = f"<{count}{kind.layout}"
        values = struct.unpack_from(layout, self.data, self.advance(struct.calcsize(layout)))
        if kind == ValueType.BOOL:
            if any(value > 1 for value in values):
                raise self.fail("a truth value is neither 0 nor 1")
            return [bool(value) for value in values]
        return list(values)


class Metadata(Mapping[str, MetadataValue]):
    """The file's key-value pairs. The first access to a value decodes it, or raises MalformedGguf."""

    def __init__(self, cursor: Cursor, spans: dict[str, tuple[ValueType, int]]) -> None:
        self._cursor = cursor
        self._spans = spans
        self._decoded: dict[str, MetadataValue] = {}

    def __getitem__(self, key: str) -> MetadataValue:
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
        """The integer at `key`; `default` if the key is missing.

        Raises MalformedGguf if the key is missing and there is no default, or if the value has another type.
        """
        return self._value(key, int, "an integer", default)

    def number(self, key: str, default: float | None = None) -> float:
        """The number at `key`, under the same conditions as `integer`."""
        return float(self._value(key, (int, float), "a number", default))

    def string(self, key: str, default: str | None = None) -> str:
        """The string at `key`, under the same conditions as `integer`."""
        return self._value(key, str, "a string", default)

    def strings(self, key: str) -> list[str]:
        """The array of strings at `key`. Raises MalformedGguf if there is none."""
        return self._array(key, str, "strings")

    def integers(self, key: str) -> list[int]:
        """The array of integers at `key`. Raises MalformedGguf if there is none."""
        return self._array(key, int, "integers")

    def _array(self, key: str, kind: type[T], what: str) -> list[T]:
        values: list[Any] = self._value(key, list, "an array")
        if not all(isinstance(value, kind) for value in values):
            raise MalformedGguf(f"{self._cursor.name}: {key} is not an array of {what}")
        return values

    def _value(self, key: str, kinds: type[T] | tuple[type[T], ...], what: str, default: T | None = None) -> T:
        if key not in self and default is not None:
            return default
        if key not in self:
            raise MalformedGguf(f"{self._cursor.name}: {key} is missing")
        value = self[key]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise MalformedGguf(f"{self._cursor.name}: {key} is {type(value).__name__}, not {what}")
        return value
