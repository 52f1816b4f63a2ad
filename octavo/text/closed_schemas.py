"""JSON Schemas as those who write them for a model mean them: an object has the properties that it names.

By the letter of JSON Schema it may have any others. A small model that may write them often writes nothing else, and a
function that is called with them fails. Other servers read schemas in this way, too.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_HOLD_ONE = ("items", "additionalProperties")
_HOLD_SEVERAL = ("anyOf", "oneOf", "prefixItems")
_HOLD_NAMED = ("properties", "$defs", "definitions")
# What a schema says of further properties itself, or what says something of the same object in another place.
_SAYS_MORE = {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
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
    parts = list(_parts(made))
    if not any("allOf" in part or ("properties" in part and _COMBINES & part.keys()) for part in parts):
        for part in parts:
            if _names_all(part):
                part["additionalProperties"] = False
    return made


def _names_all(part: dict[str, Any]) -> bool:
    properties, required = part.get("properties"), part.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or _SAYS_MORE & part.keys():
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and those inside it."""
    found: list[Any] = [schema]
    while found:
        part = found.pop()
        if isinstance(part, dict):
            yield part
            found += (part[key] for key in _HOLD_ONE if key in part)
            for key in (*_HOLD_SEVERAL, *_HOLD_NAMED):
                inner = part.get(key)
                found += inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
