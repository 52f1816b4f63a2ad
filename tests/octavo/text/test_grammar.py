"""What constraints are refused, and by which words."""

import json
import time
from contextlib import suppress
from itertools import pairwise

import pytest

from octavo.request.errors import InvalidArgument
from octavo.request.limits import MAX_CHOICES, MAX_NESTING
from octavo.request.sampling import Constraint, Shape
from octavo.request.sampling_validation import check_constraint
from octavo.text.grammar import check_grammar


def schema(value):
    return Constraint(Shape.JSON_SCHEMA, json.dumps(value))


def nested(depth):
    return {"properties": {"a": nested(depth - 1)}} if depth else {"type": "integer"}


REFUSED = [
    (Constraint(Shape.JSON_SCHEMA, "{"), "is no JSON"),
    (Constraint(Shape.JSON_SCHEMA, "NaN"), "NaN is no number of JSON"),
    (Constraint(Shape.JSON_SCHEMA, "3"), "must be a JSON object"),
    (schema(nested(MAX_NESTING)), "nested deeper than 64"),
    (Constraint(Shape.JSON_SCHEMA, "[" * 60_000), "nested deeper than 64"),
    (Constraint(Shape.JSON_SCHEMA, " " * 65_537), "65537 bytes are too many"),
    (Constraint(Shape.REGEX, ""), "is empty"),
    (Constraint(Shape.REGEX, "\ud800"), "no UTF-8 form"),
    (Constraint(Shape.REGEX, "(a"), "invalid regex"),
    (Constraint(Shape.LARK, "start: foo"), "unknown name"),
    (Constraint.choice([]), f"a list of 1 to {MAX_CHOICES} texts"),
    (Constraint.choice(["a", ""]), "entry 1 must be a text that is not empty"),
    (Constraint(Shape.STRUCTURAL_TAG, "{}"), "needs structures"),
    (Constraint(Shape.STRUCTURAL_TAG, '{"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<"]}'), "a schema"),
    (schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "not supported.*uniqueItems"),
    (schema({"$ref": "https://example.org/schema"}), "https://example.org/schema"),
    (schema({"type": "integer", "minimum": 3, "maximum": 2}), "nsatisfiable|minimum"),
    (schema({"required": "\U0001f600" * 40}), "has not the type"),
    (schema({"type": "integer", "maximum": 2**70}), str(2**70)),
    (schema({"type": "number", "maximum": 1e27}), "minimum and maximum"),
    (schema({"type": "string", "pattern": r"^\cC$"}), "pattern: regex parse error"),
]


@pytest.mark.parametrize(("constraint", "message"), REFUSED, ids=str)
def test_what_cannot_be_kept_is_refused_by_name(constraint, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        check_constraint(constraint)
        check_grammar(constraint)
    assert caught.value.field == f"constraint.{constraint.shape}"


KEPT = [
    schema(True),
    schema(nested(12)),
    schema({"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
    Constraint(Shape.JSON_OBJECT),
    schema({"properties": {f"p{i}": {"type": "integer"} for i in range(300)}}),
    Constraint.choice(['"', "\\", "\n", "é", "a/b"]),
    Constraint(Shape.LARK, 'start: <|im_end|> "x" <[200012]>'),
    Constraint(
        Shape.STRUCTURAL_TAG,
        '{"structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f="]}',
    ),
]


def test_what_can_be_kept_is_taken():
    for constraint in KEPT:
        check_constraint(constraint)
        check_grammar(constraint)


HOSTILE = [
    schema({"enum": [f"value {i}" for i in range(4000)]}),
    Constraint(Shape.REGEX, "(a?){200}a{200}"),
    Constraint(Shape.REGEX, "[ab]*a[ab]{30}"),
    Constraint(
        Shape.LARK, "start: a\n" + "\n".join(f"{a}: {b} {b}" for a, b in pairwise("abcdefghijklmnopqrstu")) + '\nu: "x"'
    ),
    schema({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(6)]}),
]


@pytest.mark.parametrize("constraint", HOSTILE, ids=lambda each: each.text[:40])
def test_hostile_constraints_are_refused_or_taken_soon(constraint):
    began = time.process_time()
    check_constraint(constraint)
    with suppress(InvalidArgument):
        check_grammar(constraint)
    assert time.process_time() - began < 20  # hours, without limits
