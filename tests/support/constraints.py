"""Constraints for requests, and a way to make masks beside the oracle of runners without a model."""

import json
import random
from functools import cache
from typing import Any

from gpu_worker.constraints.grammars import Grammars
from gpu_worker.steps.runner import RunnerInfo
from octavo.request.sampling import Constraint, Shape

_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": -5},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 4},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
    "$defs": {"inner": {"type": "object", "properties": {"inner": {"$ref": "#/$defs/inner"}}, "required": ["inner"]}},
}
CONSTRAINTS = (
    Constraint(Shape.JSON_SCHEMA, json.dumps(_RECORD)),
    Constraint(Shape.JSON_OBJECT),
    Constraint(Shape.REGEX, r"([a-c]{2,5}-\d+ )+"),
    Constraint(Shape.LARK, 'start: "(" start ")" start | "z"'),
    Constraint.choice(["yes", "yes, indeed: \u00e9", "no"]),
)


JSON_FORMS = CONSTRAINTS[:2]


def any_constraint(rng: random.Random) -> Constraint:
    return rng.choice(CONSTRAINTS)


def check_json(constraint: Constraint | None, text: str) -> None:
    """Raises AssertionError unless the text of a whole output is JSON, and keeps the schema if it has one.

    No library of constraints is asked: the schema is read by hand.
    """
    if constraint not in JSON_FORMS:
        return
    try:
        value = json.loads(text)
    except ValueError as error:
        raise AssertionError(f"{text!r} is no JSON: {error}") from None
    assert isinstance(value, dict), f"{text!r} is no object"
    assert constraint == JSON_FORMS[1] or _is_record(value), f"{text!r} does not keep its schema"


def _is_record(value: dict[str, Any]) -> bool:
    """Whether the value keeps the schema _RECORD."""
    name, size, tags = value.get("name"), value.get("size"), value.get("tags")
    is_whole = isinstance(name, str) and type(size) is int and isinstance(tags, list) and size >= -5
    is_bounded = is_whole and len(name) <= 12 and len(tags) <= 4 and all(tag in ("red", "green") for tag in tags)
    return is_bounded and set(value) == {"name", "size", "tags"}  # no finite text has an `inner`


@cache
def grammars_of(info_name: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    from gpu_worker.testing.fake_runner import FakeRunner

    return Grammars(FakeRunner(vocab_size=vocab_size, eos_token_ids=eos_token_ids).info)


def shared_grammars(info: RunnerInfo) -> Grammars:
    """The grammars of a runner without a model; compiled once in a process."""
    return grammars_of(info.tokenizer, info.vocab_size, info.eos_token_ids)
