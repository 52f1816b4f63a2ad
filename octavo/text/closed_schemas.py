"""JSON Schemas as those who write them for a model mean them: an object has the properties that it names.

By the letter of JSON Schema it may have any others. A small model that may write them often writes nothing else, and a
function that is called with them fails. Other servers read schemas in this way, too.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_HOLD_ONE = ("items", "additionalProperties")
_HOLD_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_HOLD_NAMED = ("properties", "$defs", "definitions")
# What a schema says of further properties itself, or what says something of the same object in another place.
_SAYS_MORE = {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
_NAMED = re.compile(r"\"[^\"]+\"|'[^']+'|(?<=: )[^\s\[\"']+$|^oneOf\b")  # in a complaint about a schema
_COMBINES = {"anyOf", "oneOf", "$ref", "if", "dependentSchemas"}


def closed_if_object(value: Any) -> Any:
    """The closed copy of a schema that came as an object, or as the text of one; all else as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):  # what is no JSON is refused as what it is
            value = json.loads(value)
    return closed(value) if isinstance(value, dict) else value


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which objects that name properties have no others, unless they say so.

    What satisfies the copy satisfies the schema. One whose parts speak of the same object is left as it is.
    """
    try:
        made = copy.deepcopy(dict(schema))
    except RecursionError:
        return dict(schema)  # those who keep schemas refuse it for that
    parts = [part for _, part in _parts(made)]
    if not any("allOf" in part or ("properties" in part and _COMBINES & part.keys()) for part in parts):
        for part in parts:
            if _names_all(part):
                part["additionalProperties"] = False
    return made


def place_of(schema: Any, complaint: str) -> str:
    """The path of a part that has what the complaint names: a keyword, or the value of one. Empty: none is found."""
    named = {text.strip("\"'") for text in _NAMED.findall(complaint)}
    for path, part in _parts(schema):
        for key, value in part.items():
            if key in named or (isinstance(value, str) and value.removeprefix("#") in named):
                return path
    return ""


def _names_all(part: dict[str, Any]) -> bool:
    properties, required = part.get("properties"), part.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or _SAYS_MORE & part.keys():
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and those inside it, with their paths."""
    found: list[tuple[str, Any]] = [("", schema)]
    while found:
        path, part = found.pop()
        if isinstance(part, dict):
            yield path, part
            before = f"{path}." if path else ""
            found += ((f"{before}{key}", part[key]) for key in _HOLD_ONE if key in part)
            for key in (*_HOLD_SEVERAL, *_HOLD_NAMED):
                inner = part.get(key)
                named = (
                    inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ()
                )
                found += ((f"{before}{key}.{name}", each) for name, each in named)
