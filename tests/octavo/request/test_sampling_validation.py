"""Sampling parameters against the table, against the contract written a second time, and against everything else."""

import dataclasses
import json
import random

import pytest
from effort import draws
from parameter_values import INF, NAN, VOCAB, all_beyond, inside
from refusals import refusal

from octavo.request import sampling_validation
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import PARAMETERS, SamplingParams, Shape
from octavo.v1 import types_pb2
from octavo.wire.public import sampling_from_wire

EOS = (2,)
DEFAULT = SamplingParams()


def check(params, vocab_size=VOCAB, eos_token_ids=EOS):
    sampling_validation.validate_sampling(params, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


def allows(p, vocab=VOCAB, eos=EOS):
    """The contract, in the plainest words; for parameters whose values have the right types."""
    ids = range(vocab)
    most = 256 if p.max_tokens is None else p.max_tokens
    drawable = set(p.allowed_token_ids or ids) - set(p.banned_token_ids)
    drawable -= {sequence[-1] for sequence in p.banned_sequences if sequence}
    early = drawable - set(p.stop_token_ids) - (set() if p.ignore_eos else set(eos))
    rows = PARAMETERS.values()
    unchanged = [row.name for row in rows if not row.beside_beams and row.name != "temperature"]
    beams = (
        2 <= p.beam_width <= 16
        and p.n <= p.beam_width
        and p.best_of in (0, p.n)
        and p.temperature in (0, 1)
        and all(getattr(p, name) == getattr(DEFAULT, name) for name in unchanged)
    )
    numbers = [(getattr(p, row.name), row.allowed) for row in rows if row.allowed]
    return all(
        (
            all((value is None and allowed.optional) or value in allowed for value, allowed in numbers),
            all(len(getattr(p, row.name)) <= row.most for row in rows if row.most is not None),
            all(token in ids for row in rows if row.is_ids for token in getattr(p, row.name)),
            p.best_of == 0 or p.n <= p.best_of,
            p.min_tokens <= most,
            all(1 <= len(text.encode()) <= 256 for text in p.stop),
            all(token in ids and -100 <= bias <= 100 for token, bias in p.logit_bias.items()),
            all(1 <= len(sequence) <= 16 for sequence in p.banned_sequences),
            all(token in ids for sequence in p.banned_sequences for token in sequence),
            bool(drawable),
            p.constraint is None or (allows_constraint(p.constraint) and not p.ignore_eos),
            p.constraint is None or p.thinking_budget is None,
            bool(early) or not p.min_tokens,
            p.beam_width == 0 or beams,
        )
    )


def allows_constraint(constraint):
    size = len(constraint.text.encode())
    if constraint.shape is Shape.JSON_OBJECT:
        return True
    if constraint.shape is Shape.REGEX:
        return 0 < size <= 16_384
    if constraint.shape is Shape.LARK:
        return 0 < size <= 65_536
    try:
        value = json.loads(constraint.text) if size <= 65_536 else None
    except ValueError:
        return False
    if constraint.shape is not Shape.CHOICE:
        return size <= 65_536
    return value is not None and 1 <= len(value) <= 1024 and all(value)


def passes(params):
    error = refusal(check, params)
    if error is None:
        return True
    assert error.field
    assert error.message.startswith(error.field + ": ")
    assert all(len(violation.description) < 300 for violation in error.violations)
    return False


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        (SamplingParams(n=4, best_of=2, min_tokens=9, max_tokens=5), {"best_of", "min_tokens"}),
        (
            SamplingParams(beam_width=2, n=3, best_of=4, temperature=0.5, top_p=0.5, presence_penalty=1.0),
            {"beam_width", "best_of", "temperature", "top_p", "presence_penalty"},
        ),
    ],
)
def test_all_fields_that_contradict_others_are_named_together(params, fields):
    error = refusal(check, params)
    assert {violation.field for violation in error.violations} == fields


@pytest.mark.parametrize("row", PARAMETERS.values(), ids=lambda row: row.name)
def test_a_bad_value_is_refused_by_name(row):
    for value in [value for field, value in all_beyond() if field == row.name]:
        error = refusal(check, dataclasses.replace(DEFAULT, **{row.name: value}))
        assert error is not None and error.field.split(".")[0] == row.name, value
        if row.allowed and not isinstance(value, str):
            assert str(row.allowed) in error.message, value


@pytest.mark.parametrize("row", PARAMETERS.values(), ids=lambda row: row.name)
def test_the_edges_are_allowed(row):
    for value in inside(row):
        needed = {"n": {"best_of": value}, "min_tokens": {"max_tokens": 2**32 - 1}}
        params = dataclasses.replace(DEFAULT, **needed.get(row.name, {}), **{row.name: value})
        assert allows(params)
        check(params)


TOGETHER = [
    ("best_of", {"n": 3, "best_of": 2}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("beam_width", {"n": 4, "beam_width": 3}),
    ("best_of", {"n": 2, "beam_width": 4, "best_of": 4}),
    *[(row.name, {"beam_width": 4, row.name: inside(row)[-1]}) for row in PARAMETERS.values() if not row.beside_beams],
    ("banned_token_ids", {"banned_token_ids": tuple(range(VOCAB))}),
    ("banned_sequences", {"banned_sequences": tuple((1, token) for token in range(VOCAB))}),
    ("banned_token_ids", {"allowed_token_ids": (3, 4), "banned_token_ids": (4, 3)}),
    ("banned_sequences", {"allowed_token_ids": (3, 4), "banned_token_ids": (3,), "banned_sequences": ((1, 4),)}),
    ("min_tokens", {"allowed_token_ids": (3, 4), "stop_token_ids": (3, 4), "min_tokens": 1}),
    ("min_tokens", {"allowed_token_ids": EOS, "min_tokens": 1}),
]


@pytest.mark.parametrize(("field", "values"), TOGETHER)
def test_values_that_do_not_go_together(field, values):
    params = dataclasses.replace(DEFAULT, **values)
    assert not allows(params)
    with pytest.raises(InvalidArgument) as caught:
        check(params)
    assert caught.value.field == field


# All values at once

FLOATS = [0.0, -0.0, 0.5, 1.0, 2.0, -2.0, 4.0, 10.0, 100.0, 1e-45, -1e-30, 1e38, NAN, INF, -INF]
U32S = [0, 1, 2, 3, 4, 15, 16, 17, 20, 21, 255, 256, 257, VOCAB - 1, VOCAB, 2**31, 2**32 - 1]
TEXTS = ["", "a", "stop", "é" * 128, "x" * 256, "x" * 257, "\0", "\U0001f600" * 64]


def random_proto(rng):
    message = types_pb2.SamplingParams()
    fields = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    for name in rng.sample(list(fields), rng.choice([0, 1, 1, 2, 2, 3, 5, len(fields)])):
        fill(message, name, rng)
    return message


def fill(message, name, rng):
    if name == "stop":
        message.stop.extend(
            rng.choices(
                TEXTS[rng.randrange(2) :: 2] if rng.random() < 0.3 else TEXTS[1:5], k=rng.choice([1, 3, 16, 17])
            )
        )
    elif name == "logit_bias":
        for _ in range(rng.choice([1, 2, 5])):
            message.logit_bias[rng.choice(U32S[: rng.choice([-3, 17])])] = rng.choice(FLOATS[: rng.choice([9, 15])])
    elif name == "banned_sequences":
        for _ in range(rng.choice([1, 2, 3, 5] if rng.random() < 0.99 else [1024, 1025])):
            size = rng.choice([1, 2, 16, 17] if rng.random() < 0.05 else [1, 2, 3])
            message.banned_sequences.add(ids=rng.choices(U32S[: rng.choice([-3, 17, 3, 3])], k=size))
    elif PARAMETERS[name].most is not None:
        size = rng.choice([1, 2, 10, 64, 65] if rng.random() < 0.985 else [4096, 4097])
        getattr(message, name).extend(rng.choices(U32S[: rng.choice([-3, 17])], k=size))
    elif PARAMETERS[name].is_flag:
        setattr(message, name, rng.random() < 0.5)
    elif PARAMETERS[name].is_constraint:
        shape = rng.choice(["json_schema", "json_object", "regex", "lark", "structural_tag", "choice", ""])
        if shape == "choice":
            message.constraint.choice.texts.extend(rng.choices(TEXTS[1:5], k=rng.choice([0, 1, 1025])))
        elif shape:
            setattr(message.constraint, shape, rng.random() < 0.5 if shape == "json_object" else rng.choice(TEXTS))
        else:
            message.constraint.engine = "x"
    elif PARAMETERS[name].allowed.integer:
        setattr(message, name, rng.choice(U32S) if name != "seed" else rng.getrandbits(64))
    else:
        setattr(message, name, rng.choice(FLOATS))


@pytest.mark.scaled
def test_hostile_messages():
    """Whatever arrives is refused or within every limit of the oracle: nothing else, and nothing too strict."""
    rng, num_messages = random.Random(20261121), draws(5000, 60_000)
    num_passed, too_long = 0, set()
    for _ in range(num_messages):
        try:
            params = sampling_from_wire(random_proto(rng))
        except InvalidArgument as error:
            too_long.add(error.field)
            continue
        passed = passes(params)
        assert passed == allows(params), params
        num_passed += passed
    lists = {row.name for row in PARAMETERS.values() if row.most is not None} - {"logit_bias"}
    assert too_long == lists | {"constraint", "constraint.json_object"}
    assert num_messages // 10 < num_passed < num_messages * 9 // 10  # or the fuzzer has lost its aim


HOSTILE = [value for _, value in all_beyond()] + [-(10**5000), "\ud800", object(), (NAN,), ((),), {10**5000: 1}]
HOSTILE += [{None: None}, {1.5: 1}, complex(1, 1), set(), {}, 1, 2, 0.5]


@pytest.mark.scaled
def test_values_of_any_type():
    rng = random.Random(7)
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    for _ in range(draws(5000, 20_000)):
        chosen = {name: rng.choice(HOSTILE) for name in rng.sample(names, rng.choice([1, 1, 2, 4]))}
        passes(dataclasses.replace(DEFAULT, **chosen))


def test_a_beam_search_may_have_temperature_0_or_none():
    """Who is told that n > 1 at temperature 0 needs beam_width adds it, and keeps the temperature."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, beam_width=3, n=2)
        sampling_validation.validate_sampling(params, vocab_size=100)
        concrete = sampling_validation.resolve(params, prompt_len=3, context_tokens=100, seed_source=lambda: 1)
        assert (concrete.temperature, concrete.beam_width) == (1.0, 3)
