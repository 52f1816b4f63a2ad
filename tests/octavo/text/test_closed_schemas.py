"""Objects have the properties that a schema names, and what satisfies the closed schema satisfies the schema."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.text.closed_schemas import closed

INTEGER = {"type": "integer"}


def takes(schema, value):
    """Whether the text is one of the schema's."""
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    return matcher.consume_tokens(list(json.dumps(value).encode())) and matcher.is_accepting()


CLOSED = [
    ({"properties": {"a": INTEGER}}, {"a": 1}, {"b": 1}),
    ({"properties": {}}, {}, {"b": 1}),
    ({"properties": {"a": {"properties": {"b": INTEGER}}}}, {"a": {"b": 1}}, {"a": {"c": 1}}),
    ({"items": {"anyOf": [{"type": "null"}, {"properties": {"a": INTEGER}}]}}, [{"a": 1}, None], [{"b": 1}]),
    ({"$defs": {"p": {"properties": {"a": INTEGER}}}, "$ref": "#/$defs/p"}, {"a": 1}, {"a": 1, "b": 2}),
    ({"additionalProperties": {"properties": {"a": INTEGER}}}, {"x": {"a": 1}}, {"x": {"b": 1}}),
]


@pytest.mark.parametrize(("schema", "kept", "left_out"), CLOSED, ids=str)
def test_an_object_has_the_properties_that_it_names(schema, kept, left_out):
    before = json.dumps(schema)
    assert takes(schema, kept) and takes(schema, left_out)
    assert takes(closed(schema), kept) and not takes(closed(schema), left_out)
    assert json.dumps(schema) == before


LEFT = [
    {"type": "object"},
    {"properties": {"a": INTEGER}, "additionalProperties": True},
    {"properties": {"a": INTEGER}, "required": ["b"]},
    {"properties": {"a": INTEGER}, "minProperties": 2},
    {"properties": {"a": INTEGER}, "patternProperties": {"^b": INTEGER}},
    {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}]},
    {"properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"const": {"properties": {}}},
    {"properties": []},
]


@pytest.mark.parametrize("schema", LEFT, ids=str)
def test_what_says_more_is_left_as_it_is(schema):
    assert closed(schema) == schema
