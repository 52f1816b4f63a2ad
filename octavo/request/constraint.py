"""What an output must be like: a JSON schema, a regular expression, a grammar or one of some texts.

A `Constraint` is a plain value. `octavo.text.grammar` says whether it can be kept, and makes a grammar of it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from octavo.request.errors import InvalidArgument

MAX_BYTES = 64 * 1024
MAX_REGEX_BYTES = 16 * 1024
MAX_CHOICES = 1024
MAX_NESTING = 64


class Shape(StrEnum):
    """What kind of constraint it is. The values are the names of fields of octavo.v1.Constraint."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"

    @property
    def max_bytes(self) -> int:
        return MAX_REGEX_BYTES if self is Shape.REGEX else MAX_BYTES

    @property
    def is_json(self) -> bool:
        return self in (Shape.JSON_SCHEMA, Shape.CHOICE, Shape.STRUCTURAL_TAG)


@dataclass(frozen=True, slots=True)
class Constraint:
    """`text` is a schema, a structural tag or a list of choices as JSON, an expression, or a grammar."""

    shape: Shape
    text: str = ""  # empty for a JSON object
    # Which library makes the masks, in which version. A router writes it, and no other version may go on.
    engine: str = ""

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Constraint":
        return cls(Shape.CHOICE, json.dumps(list(choices), ensure_ascii=False))


def check_constraint(value: object) -> None:
    """Checks form and size, which is cheap. Raises InvalidArgument."""
    if value is None:
        return
    if not isinstance(value, Constraint):
        raise InvalidArgument("constraint", "must be a Constraint")
    field = f"constraint.{value.shape}"
    try:
        num_bytes = len(value.text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(field, "has no UTF-8 form") from None
    if not num_bytes <= value.shape.max_bytes:
        raise InvalidArgument(field, f"{num_bytes} bytes are too many; at most {value.shape.max_bytes}")
    if value.shape is Shape.JSON_OBJECT:
        return
    if not value.text:
        raise InvalidArgument(field, "is empty")
    if value.shape.is_json:
        parsed = parsed_json(field, value.text)
        if value.shape is Shape.CHOICE:
            _check_choices(field, parsed)


def parsed_json(field: str, text: str) -> Any:
    """The value of JSON of bounded nesting. Raises InvalidArgument."""
    try:
        parsed = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise InvalidArgument(field, f"is nested deeper than {MAX_NESTING}") from None
    except ValueError as error:
        raise InvalidArgument(field, f"is no JSON: {error}") from None
    level, depth = [parsed], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise InvalidArgument(field, f"is nested deeper than {MAX_NESTING}")
        level = [child for each in level for child in _children(each)]
    return parsed


def _children(value: Any) -> list[Any]:
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in found if isinstance(child, (dict, list))]


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_choices(field: str, choices: Any) -> None:
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidArgument(field, f"must be a list of 1 to {MAX_CHOICES} texts")
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise InvalidArgument(field, f"entry {i} must be a text that is not empty")
