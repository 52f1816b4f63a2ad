"""Grammars of constraints, by llguidance: https://github.com/guidance-ai/llguidance.

Its limits count work and not time, so what one machine refuses every machine refuses. What it cannot keep it refuses
by the keyword's name.
"""

import json
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, get_version

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import Constraint, Shape
from octavo.request.sampling_validation import parsed_json
from octavo.text.closed_schemas import place_of

# One space where JSON may have any white space: a small model that may write more can write nothing else for ever.
_JSON_OPTIONS: Any = {"whitespace_pattern": "[ ]?", "lenient": False}
_ANY_OBJECT = {"type": "object"}
# By these a mask takes 10 ms at most, an object may have hundreds of optional properties, and no schema gets into logs.
_LIMITS = LLParserLimits(
    max_grammar_size=250_000,
    max_items_in_row=8000,
    step_max_items=12_000,
    step_lexer_fuel=60_000,
    verbose_errors=False,
)
_TRIED_BYTES = 48  # of an output, by which `check_grammar` finds out what becomes too complex soon

_WORDS = {
    "Unimplemented keys:": "these keywords are not supported, leave them out:",
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "Use anyOf",
    "patternProperty regexes": "patternProperties:",
    "Failed to generate regex for float range": "minimum and maximum are beyond what can be kept",
}


@cache
def engine() -> str:
    """Which library makes the masks, in which version: another may make others of the same grammar."""
    return str(get_version())


def limits() -> LLParserLimits:
    """How much work a grammar may be, for llguidance."""
    return _LIMITS


def grammar_of(constraint: Constraint) -> str:
    """The grammar that llguidance takes. Raises InvalidArgument for a text that has not the form it must have."""
    field = f"constraint.{constraint.shape}"
    try:
        return _grammar_of(field, constraint)
    except InvalidArgument:
        raise
    except ValueError as error:  # a number beyond 64 bits
        raise InvalidArgument(field, f"cannot be read: {str(error)[:200]}") from None


def _grammar_of(field: str, constraint: Constraint) -> str:
    match constraint.shape:
        case Shape.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema(_ANY_OBJECT, overrides=_JSON_OPTIONS)
        case Shape.JSON_SCHEMA:
            schema = parsed_json(field, constraint.text)
            if schema is True:
                schema = {}
            if not isinstance(schema, dict):
                raise InvalidArgument(field, "must be a JSON object, or true")
            return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        case Shape.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case Shape.CHOICE:
            choices = parsed_json(field, constraint.text)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
        case Shape.STRUCTURAL_TAG:
            return _tagged(field, parsed_json(field, constraint.text))
        case Shape.LARK:
            return LLMatcher.grammar_from_lark(constraint.text)


def check_grammar(constraint: Constraint) -> None:
    """Refuses what cannot be kept. It may take a tenth of a second, and holds no lock of Python's meanwhile."""
    found = _complaint(grammar_of(constraint))
    if found and not found.startswith("WARNING"):
        what = _in_short(found)
        if constraint.shape is Shape.JSON_SCHEMA and what.startswith("regex parse error"):
            what = f"pattern: {what}"
        if constraint.shape is Shape.JSON_SCHEMA and (place := place_of(json.loads(constraint.text), what)):
            what = f"{what}, in {place}"
        raise InvalidArgument(f"constraint.{constraint.shape}", what)
    if complaint := _tried(constraint):
        raise InvalidArgument(f"constraint.{constraint.shape}", f"is too complex, simplify it: {complaint}")


def _complaint(text: str) -> str:
    """What the library says of a grammar. It panics where it cuts a complaint within a character."""
    try:
        return LLMatcher.validate_grammar(text, None, limits=limits())
    except BaseException as error:  # what a panic becomes is no Exception, and has no name that can be imported
        if type(error).__name__ != "PanicException":
            raise
        return "cannot be read: a value has not the type that its keyword needs"


def _tried(constraint: Constraint) -> str:
    """Why an output that takes the first byte that it may, again and again, becomes too complex; empty: it does not.

    A grammar with special tokens of a model is not tried: bytes do not have them.
    """
    matcher = LLMatcher(_bytes(), grammar_of(constraint), log_level=0, limits=limits())
    if matcher.is_error():
        return ""
    for _ in range(_TRIED_BYTES):
        mask = matcher.compute_bitmask()
        first = next((i for i, byte in enumerate(mask[:32]) if byte), None)
        if first is None or matcher.is_error() or matcher.is_stopped():
            break
        matcher.try_consume_tokens([8 * first + (mask[first] & -mask[first]).bit_length() - 1])
    return str(matcher.get_error()).splitlines()[0][:200] if matcher.is_error() else ""


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of the 256 bytes."""
    return LLTokenizer("byte")


def _in_short(message: str) -> str:
    """The part of llguidance's message that says what is wrong, in words of a caller."""
    lines = message.strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = f"{lines[0].strip().removesuffix(':')}: {errors[-1]}" if errors else lines[0].strip()
    for theirs, ours in _WORDS.items():
        line = line.replace(theirs, ours)
    return line[:300]


def _tagged(field: str, tag: Any) -> str:
    """The grammar of free text with tagged parts: {"structures": [{"begin", "schema", "end"}], "triggers": [text]}."""
    if isinstance(tag, dict) and isinstance(tag.get("structural_tag"), dict):
        tag = tag["structural_tag"]
    structures = tag.get("structures") if isinstance(tag, dict) else None
    triggers = tag.get("triggers") if isinstance(tag, dict) else None
    if not (isinstance(structures, list) and structures and isinstance(triggers, list) and triggers):
        raise InvalidArgument(field, "needs structures, each with begin, schema and end, and triggers")
    tags = []
    for i, each in enumerate(structures):
        if not (isinstance(each, dict) and isinstance(each.get("begin"), str) and isinstance(each.get("end"), str)):
            raise InvalidArgument(field, f"structure {i} needs begin and end, which are texts")
        schema = each.get("schema")
        if not isinstance(schema, dict):
            raise InvalidArgument(field, f"structure {i} needs a schema, which is an object")
        starts = [text for text in triggers if isinstance(text, str) and text and each["begin"].startswith(text)]
        if not starts:
            raise InvalidArgument(field, f"structure {i} begins with none of the triggers")
        tags.append(StructTag(trigger=starts[0], begin=each["begin"], grammar=schema, end=each["end"]))
    return StructTag.to_grammar(tags)
