"""Constraints for requests, and a way to make masks beside the oracle of runners without a model."""

import json
import random
from functools import cache

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


def any_constraint(rng: random.Random) -> Constraint:
    return rng.choice(CONSTRAINTS)


@cache
def grammars_of(info_name: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    from gpu_worker.testing.fake_runner import FakeRunner

    return Grammars(FakeRunner(vocab_size=vocab_size, eos_token_ids=eos_token_ids).info)


def shared_grammars(info: RunnerInfo) -> Grammars:
    """The grammars of a runner without a model; compiled once in a process."""
    return grammars_of(info.tokenizer, info.vocab_size, info.eos_token_ids)
