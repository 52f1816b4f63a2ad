"""Grammars of calls in Python's words, as Gemma and Llama's pythonic templates write them: name(key="value").

A value stands there as JSON, which Python reads alike, or as True, False or None.
"""

import json
import keyword
import unicodedata
from collections.abc import Mapping
from typing import Any

from octavo.request.errors import InvalidArgument
from octavo.text.closed_schemas import closed

_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}
_KNOWN = {"type", "properties", "required", "additionalProperties", "title", "description", "$defs"}
_SAYS_NOTHING = {"type", "title", "description", "default", "examples"}
_WORDS = {"boolean": ("True", "False"), "null": ("None",)}
_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/ & ~/" + "|".join(sorted(keyword.kwlist)) + "/"


def python_rules(rule: str, tool: str, schema: Mapping[str, Any] | None) -> list[str]:
    """The rules of a tool's arguments; without a schema they may be any.

    What a schema does not name does not come: a call that names a key twice would be none. Raises InvalidArgument for
    what Python cannot say.
    """
    if not all(map(_is_name, tool.split("."))):
        raise _refused(f"the name {tool!r} is none in Python, and so no call")
    if schema is None:
        any_value = f"%json {json.dumps(_JSON_OPTIONS)}"
        one = f'{rule.upper()} "=" {rule}_any'
        words = " | ".join(json.dumps(word) for each in _WORDS.values() for word in each)
        value = f"{rule}_any: {rule}_value | {words}"
        return [f'{rule}: ({one} (", " {one})*)?', f"{rule.upper()}: {_KEY}", value, f"{rule}_value: {any_value}"]
    properties, required = schema.get("properties", {}), schema.get("required", ())
    unknown = set(schema) - _KNOWN
    if unknown or not isinstance(properties, dict) or not are_among(required, properties):
        raise _refused(f"what the schema of {tool!r} says of {', '.join(sorted(unknown)) or 'its properties'}")
    rules: list[str] = []
    after = json.dumps("")
    first = after  # what may stand where no argument has come: begun from behind
    for i, (name, inner) in reversed(list(enumerate(properties.items()))):
        if not _is_name(name):
            raise _refused(f"the argument {name[:64]!r} of {tool!r}, which is no name in Python,")
        each = f"{rule}_{i}"
        rules += [f"{each}: {json.dumps(name + '=')} {_value(each, tool, name, inner, schema.get('$defs'), rules)}"]
        one = f'", " {each}' if name in required else f'(", " {each})?'
        rules += [f"{each}_first: {each} {after}" + ("" if name in required else f" | {first}")]
        rules += [f"{each}_after: {one} {after}"]
        first, after = f"{each}_first", f"{each}_after"
    return [f"{rule}: {first}", *rules]


def _value(rule: str, tool: str, name: str, schema: Any, definitions: Any, rules: list[str]) -> str:
    """The value of an argument, as a part of its rule. Its own rules are added to `rules`."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refused(f"what the schema of {tool!r} says of {name!r}")
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    words = [word for kind in kinds if isinstance(kind, str) for word in _WORDS.get(kind, ())]
    if set(schema) - _SAYS_NOTHING:
        words = []  # which of them may come is said in JSON
    shared = {"$defs": definitions} if definitions else {}
    whole = {**closed({**schema, **shared}), **_JSON_OPTIONS}
    rules.append(f"{rule}_value: %json {json.dumps(whole)}")
    return f"({' | '.join([f'{rule}_value', *map(json.dumps, words)])})"


def _is_name(text: str) -> bool:
    """Whether Python takes it for a name, and for this one: it does not tell some characters apart."""
    is_same = text.isidentifier() and unicodedata.normalize("NFKC", text) == text
    return is_same and not keyword.iskeyword(text) and text != "__debug__"


def are_among(required: Any, properties: Mapping[str, Any]) -> bool:
    """Whether these are names of properties."""
    return isinstance(required, (list, tuple)) and all(
        isinstance(each, str) and each in properties for each in required
    )


def _refused(what: str) -> InvalidArgument:
    said = f"{what[:200]} cannot be kept in this model's form of calls; use auto, and leave out strict"
    return InvalidArgument("tool_choice", said)
