"""Messages as JSON for people and programs that watch: every field, by its name in the proto file, with plain numbers.

protobuf's own conversion is written in Python, looks up what it needs again for each field, and writes whole numbers of
64 bits as text. This one is used once a second beside streams of tokens, for hundreds of messages.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

Convert = Callable[[Any], Any]


def message_json(message: Message) -> bytes:
    """The message as one line of JSON."""
    return json.dumps(message_values(message), ensure_ascii=False, separators=(",", ":")).encode()


def message_values(message: Message) -> dict[str, Any]:
    """All fields by name. Enums are names, and a message that is not set is None. Bytes and maps are not converted."""
    found: dict[str, Any] = {}
    for name, convert, is_optional in _fields(message.DESCRIPTOR):
        if is_optional and not message.HasField(name):
            found[name] = None
        else:
            value = getattr(message, name)
            found[name] = value if convert is None else convert(value)
    return found


@cache
def _fields(descriptor: Descriptor) -> tuple[tuple[str, Convert | None, bool], ...]:
    """Each field: its name, the function that makes a plain value of it, and whether it may be absent."""
    return tuple((field.name, _conversion(field), field.has_presence) for field in descriptor.fields)


def _conversion(field: FieldDescriptor) -> Convert | None:
    one = _conversion_of_one(field)
    if not field.is_repeated:
        return one
    return list if one is None else lambda values: [one(value) for value in values]


def _conversion_of_one(field: FieldDescriptor) -> Convert | None:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return message_values
    if field.enum_type is not None:
        names = {value.number: value.name for value in field.enum_type.values}
        return lambda number: names.get(number, str(number))
    if field.type == FieldDescriptor.TYPE_FLOAT:  # of 32 bits: its further digits say nothing
        return lambda value: round(value, 3)
    return None
