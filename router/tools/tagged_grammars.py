"""Grammars of arguments that stand each between marks of their own, as Qwen3-Coder and GLM write them.

A text stands there as it is, and all else as JSON. What a schema says of texts beside `enum` cannot be kept there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.request.errors import InvalidArgument
from router.tools.formats import ToolFormat
from router.tools.python_grammars import are_among

_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}
_TYPES = ("integer", "number", "boolean", "object", "array", "null")
_SAYS_NOTHING = {
    "type",
    "title",
    "description",
    "default",
    "examples",
    "enum",
}  # of a text that a grammar could not keep


def tagged_rules(rule: str, tool: str, schema: Mapping[str, Any], form: ToolFormat) -> list[str]:
    """The rule of a tool's arguments, and those of each. Raises InvalidArgument for a schema that cannot be kept."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    unknown = set(schema) - {"type", "properties", "required", "additionalProperties", "title", "description", "$defs"}
    if unknown or not isinstance(properties, dict) or not are_among(required, properties):
        raise _refused(tool, ", ".join(sorted(unknown)) or "its properties")
    parts, rules = [], []
    for i, (name, inner) in enumerate(properties.items()):
        each = f"{rule}_{i}"
        parts.append(each if name in required else f"{each}?")
        rules += _argument_rules(each, tool, name, inner, schema.get("$defs"), form)
    return [f"{rule}: {' '.join(parts) or json.dumps('')}", *rules]


def _argument_rules(rule: str, tool: str, name: str, schema: Any, definitions: Any, form: ToolFormat) -> list[str]:
    begin, end = json.dumps(form.open_argument.replace("KEY", name)), json.dumps(form.close_argument)
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind in _TYPES:
        shared = {"$defs": definitions} if definitions else {}
        return [
            f"{rule}: {begin} {rule}_value {end}",
            f"{rule}_value: %json {json.dumps({**schema, **shared, **_JSON_OPTIONS})}",
        ]
    if kind != "string" or set(schema) - _SAYS_NOTHING:
        raise _refused(tool, name)
    if "enum" not in schema:
        return [
            f"{rule}: {begin} {rule.upper()}",
            f"{rule.upper()}: {_text_to(form.close_argument.strip(), form.no_text)}",
        ]
    texts = schema["enum"]
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) and text == text.strip("\n") for text in texts)
    ):
        raise _refused(tool, name)
    return [f"{rule}: {begin} ({' | '.join(map(json.dumps, texts))}) {end}"]


def _text_to(mark: str, no_text: Sequence[str]) -> str:
    """The terminal of a text up to the first mark, without what a reader would take for something else."""
    end, others = _escaped(mark), "|".join(map(_escaped, no_text))
    return rf"/(?s:.*){end}\n/ & ~/(?s:.*){end}\n(?s:.+)/ & ~/(?s:.*){end}[^\n](?s:.*)/ & ~/(?s:.*)({others})(?s:.*)/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace(r"\ ", " ")


def _refused(tool: str, what: str) -> InvalidArgument:
    said = f"what the schema of {tool!r} says of {what[:64]} cannot be kept in this model's form of calls; use auto"
    return InvalidArgument("tool_choice", said)
