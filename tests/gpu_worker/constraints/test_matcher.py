"""A matcher is a function of grammar and output: whenever it is made, it gives the same masks."""

import json
import random
from dataclasses import replace

import pytest

from gpu_worker.constraints.grammars import Grammars
from gpu_worker.steps.mask import Mask
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import InvalidArgument, Mismatch, NoTokenizer
from octavo.request.sampling import Constraint, Shape

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    Constraint(Shape.JSON_SCHEMA, json.dumps(PERSON)),
    Constraint(Shape.JSON_OBJECT),
    Constraint(Shape.REGEX, r"[a-c]{2,5}-\d+(x|y)*"),
    Constraint(Shape.LARK, 'start: "(" start ")" | "z"'),
    Constraint.choice(["ja", "nein", "vielleicht: é\n"]),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(FakeRunner().info)


def allowed(mask: Mask) -> list[int]:
    return [8 * place + bit for place, byte in enumerate(bytes(mask)) for bit in range(8) if byte >> bit & 1]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda each: each.shape)
def test_masks_are_those_of_a_matcher_that_begins_with_the_tokens(grammars, constraint: Constraint) -> None:
    """Forced tokens have no rival. Masks of drafts and of what is foreseen are those of a branch that has got them."""
    rng, grammar, num_forced = random.Random(7), grammars.compile(constraint), 0

    def fresh(output: list[int]) -> Mask:
        return grammar.matcher().mask([9, 9, *output], 2)

    for _ in range(12):
        tokens, live = [9, 9], grammar.matcher()
        while (choices := allowed(live.mask(tokens, 2))) != [0] and len(tokens) < 42:
            assert choices and live.mask(tokens, 2) == fresh(output := tokens[2:]), bytes(output)
            forced = live.forced(tokens, 2)
            for place, token in enumerate(forced):
                assert allowed(fresh([*output, *forced[:place]])) == [token]
            num_forced += len(forced)
            drafts = [*(forced or [rng.choice(choices)]), *rng.choices(range(1, 128), k=3)]
            for place, mask in enumerate(live.draft_masks(tokens, 2, drafts)):
                assert mask == fresh([*output, *drafts[: place + 1]])
            going_on = len(live.draft_masks(tokens, 2, forced))
            assert live.mask(tokens, 2, foresee=40) == fresh(output)
            tokens.append(rng.choice([token for token in choices if token]))
            ahead, masks = live.foreseen(tokens, 2)
            assert ahead == forced[1:going_on]
            assert masks == [fresh([*tokens[2:], *ahead[:end]]) for end in range(1, len(ahead) + 1)]
            later = [choices[0], 2]  # it catches up by itself
            assert live.draft_masks(tokens, 2, later) == grammar.matcher().draft_masks(tokens, 2, later)
            assert live.foreseen([*tokens, 1], 2) == live.foreseen([*tokens[:-1], 127], 2) == ([], [])
    assert num_forced or constraint.shape in (Shape.JSON_OBJECT, Shape.REGEX, Shape.LARK)


def test_no_more_is_foreseen_than_is_wanted(grammars) -> None:
    """A long forced text costs each step no more than a short one."""
    live = grammars.compile(Constraint.choice(["x" * 4000])).matcher()
    assert live.foreseen([], 0) == ([], [])
    live.mask([], 0, foresee=16)
    assert len(live._foreseen.masks) == 17
    ahead, masks = live.foreseen(list(b"x"), 0)
    assert (bytes(ahead), len(masks)) == (b"x" * 16, 16)


def test_an_output_that_breaks_the_form_leaves_no_token_and_says_where(grammars):
    matcher = grammars.compile(CONSTRAINTS[0]).matcher()
    assert allowed(matcher.mask(list(b'{"name":"x", "b'), 0)) == []
    failure = matcher.failure_after(list(b'{"name":"x", "b'), 0)
    assert failure.reason == "CONSTRAINT_DIVERGED" and "output token 15" in failure.message


def test_what_becomes_too_complex_is_no_divergence(grammars):
    schema = {"type": "string"}
    for _ in range(10):
        one = {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}, "required": ["a"]}
        schema = {"anyOf": [one, one]}
    matcher = grammars.compile(Constraint(Shape.JSON_SCHEMA, json.dumps(schema))).matcher()
    output = b'{"a":' * 10 + b'"x"}'
    assert not all(allowed(matcher.mask(output[:number], 0)) for number in range(len(output)))
    failure = matcher.failure_after(list(output), 0)
    assert failure.reason == "CONSTRAINT_UNMET" and "too complex" in failure.message


@pytest.mark.parametrize(
    ("constraint", "error", "message"),
    [
        (Constraint(Shape.REGEX, "a+", "llguidance 0"), Mismatch, "begun with llguidance 0"),
        (Constraint(Shape.JSON_SCHEMA, '{"type":"array","uniqueItems":true}'), InvalidArgument, "uniqueItems"),
        (Constraint(Shape.JSON_SCHEMA, '{"not":{}}'), InvalidArgument, "not"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_name(grammars, constraint, error, message):
    with pytest.raises(error, match=message):
        grammars.compile(constraint)
    endless = Grammars(replace(FakeRunner().info, eos_token_ids=()))
    with pytest.raises(NoTokenizer, match="names no end token"):
        endless.compile(CONSTRAINTS[0])


def test_the_cache_keeps_the_latest_within_its_bytes():
    grammars = Grammars(FakeRunner().info, cache_bytes=5 << 16)
    made = {text: grammars.compile(Constraint(Shape.REGEX, text)) for text in "abc"}
    assert grammars.compile(Constraint(Shape.REGEX, "c")) is made["c"]
    assert grammars.compile(Constraint(Shape.REGEX, "a")) is not made["a"]
