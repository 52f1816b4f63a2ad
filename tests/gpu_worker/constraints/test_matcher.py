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
def test_a_matcher_that_begins_anywhere_gives_the_masks_of_one_that_never_stopped(grammars, constraint: Constraint):
    rng, grammar, prompt = random.Random(3), grammars.compile(constraint), [9, 9]
    for _ in range(10):
        tokens, live = list(prompt), grammar.matcher()
        for _ in range(40):
            mask = live.mask(tokens, len(prompt))
            assert grammar.matcher().mask(tokens, len(prompt)) == mask
            choices = allowed(mask)
            assert choices, bytes(tokens[2:])
            if choices == [0]:  # the end of the text
                break
            tokens.append(rng.choice([token for token in choices if token]))


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda each: each.shape)
def test_what_comes_after_drafts_is_what_comes_after_tokens(grammars, constraint: Constraint) -> None:
    """Forced tokens have no rival, and masks of drafts are those of a branch that has got them."""
    rng, grammar, num_forced = random.Random(7), grammars.compile(constraint), 0
    for _ in range(12):
        tokens: list[int] = []
        live = grammar.matcher()
        while (choices := allowed(live.mask(tokens, 0))) != [0] and len(tokens) < 40:
            forced = live.forced(tokens, 0)
            walked = list(tokens)
            for token in forced:
                assert allowed(grammar.matcher().mask(walked, 0)) == [token]
                walked.append(token)
            num_forced += len(forced)
            drafts = (
                [*forced, *rng.choices(range(1, 128), k=3)] if forced else [rng.choice(choices), rng.randrange(1, 128)]
            )
            masks = live.draft_masks(tokens, 0, drafts)
            for place, mask in enumerate(masks):
                assert mask == grammar.matcher().mask([*tokens, *drafts[: place + 1]], 0)
            going_on = len(live.draft_masks(tokens, 0, forced))
            assert live.mask(tokens, 0, foresee=40) == grammar.matcher().mask(tokens, 0)
            tokens.append(rng.choice([token for token in choices if token]))
            ahead, masks = live.foreseen(tokens, 0)
            assert ahead == forced[1:going_on]
            assert masks == [grammar.matcher().mask([*tokens, *ahead[:end]], 0) for end in range(1, len(ahead) + 1)]
            fresh = grammar.matcher().draft_masks(tokens, 0, [choices[0], 2])
            assert live.draft_masks(tokens, 0, [choices[0], 2]) == fresh  # it catches up by itself
            assert live.foreseen([*tokens, 1], 0) == live.foreseen([*tokens[:-1], 127], 0) == ([], [])
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


def test_a_grammar_of_another_engine_is_refused(grammars):
    with pytest.raises(Mismatch, match="begun with llguidance 0"):
        grammars.compile(Constraint(Shape.REGEX, "a+", "llguidance 0"))


def test_what_cannot_be_kept_is_refused_by_its_name(grammars):
    for text, name in ((r'{"type":"array","uniqueItems":true}', "uniqueItems"), (r'{"not":{}}', "not")):
        with pytest.raises(InvalidArgument, match=name):
            grammars.compile(Constraint(Shape.JSON_SCHEMA, text))


def test_the_cache_keeps_the_latest_within_its_bytes():
    grammars = Grammars(FakeRunner().info, cache_bytes=5 << 16)
    made = {text: grammars.compile(Constraint(Shape.REGEX, text)) for text in "abc"}
    assert grammars.compile(Constraint(Shape.REGEX, "c")) is made["c"]
    assert grammars.compile(Constraint(Shape.REGEX, "a")) is not made["a"]


def test_a_model_without_an_end_is_refused() -> None:
    endless = Grammars(replace(FakeRunner().info, eos_token_ids=()))
    with pytest.raises(NoTokenizer, match="names no end token"):
        endless.compile(CONSTRAINTS[0])
