"""Finds the field that makes a message unreadable: a `string` that is not UTF-8, which protobuf refuses without a name.

The search reads the bytes of the message by the wire format and trusts nothing in them.
"""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from octavo.request.errors import FieldViolation

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_DEPTH = 16


def find_bad_text(message: Descriptor, data: bytes) -> FieldViolation | None:
    """The first string field of the encoded message that is not UTF-8; None if the bytes are wrong in another way."""
    try:
        return _find(message, memoryview(data), "", MAX_DEPTH)
    except (IndexError, ValueError):
        return None


def _find(message: Descriptor, data: memoryview, prefix: str, depth: int) -> FieldViolation | None:
    counts: dict[str, int] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _value(data, at, tag & 7)
        field = message.fields_by_number.get(tag >> 3)
        if field is None or value is None:
            continue
        path = prefix + field.name
        if field.is_repeated:
            path += f"[{counts.get(field.name, 0)}]"
            counts[field.name] = counts.get(field.name, 0) + 1
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                bytes(value).decode()
            except UnicodeDecodeError as error:
                return FieldViolation(path, f"is not UTF-8 at byte {error.start}")
        elif field.message_type is not None and depth:
            found = _find(field.message_type, value, path + ".", depth - 1)
            if found:
                return found
    return None


def _value(data: memoryview, at: int, wire_type: int) -> tuple[memoryview | None, int]:
    """The bytes of a field with a length, None for a field without, and where the next field begins."""
    if wire_type == VARINT:
        return None, _varint(data, at)[1]
    if wire_type in (FIXED64, FIXED32):
        return None, at + (8 if wire_type == FIXED64 else 4)
    if wire_type != BYTES:
        raise ValueError("no such wire type")
    length, at = _varint(data, at)
    if at + length > len(data):
        raise ValueError("a field is longer than its message")
    return data[at : at + length], at + length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("a varint has at most ten bytes")
