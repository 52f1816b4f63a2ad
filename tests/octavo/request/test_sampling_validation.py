"""Sampling parameters against an oracle, which is the contract written a second time, and against everything else."""

import dataclasses
import math
import random

import pytest
from google.protobuf.message import DecodeError
from refusals import refusal

from octavo.request import limits, sampling_validation
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams
from octavo.v1 import types_pb2
from octavo.wire.public import sampling_from_wire

VOCAB, EOS = 100, (2,)
NAN, INF = math.nan, math.inf
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
    beams = (
        2 <= p.beam_width <= 16
        and p.n <= p.beam_width
        and p.best_of in (0, p.n)
        and p.temperature in (0, 1)
        and (p.top_p, p.top_k, p.min_p) == (1, 0, 0)
        and (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1, 0, 0)
    )
    return all(
        (
            0 <= p.temperature <= 10,
            0 < p.top_p <= 1,
            0 <= p.top_k < 2**32,
            0 <= p.min_p <= 1,
            1 <= p.n <= 16,
            p.best_of == 0 or p.n <= p.best_of <= 16,
            p.temperature > 0 or p.beam_width > 0 or max(p.n, p.best_of) == 1,
            p.max_tokens is None or 1 <= p.max_tokens < 2**32,
            0 <= p.min_tokens <= most,
            len(p.stop) <= 16 and all(1 <= len(text.encode()) <= 256 for text in p.stop),
            len(p.stop_token_ids) <= 64 and all(token in ids for token in p.stop_token_ids),
            0 < p.repetition_penalty <= 10,
            -2 <= p.presence_penalty <= 2,
            -2 <= p.frequency_penalty <= 2,
            len(p.logit_bias) <= 300,
            all(token in ids and -100 <= bias <= 100 for token, bias in p.logit_bias.items()),
            len(p.allowed_token_ids) <= 4096 and all(token in ids for token in p.allowed_token_ids),
            len(p.banned_token_ids) <= 4096 and all(token in ids for token in p.banned_token_ids),
            len(p.banned_sequences) <= 1024,
            all(1 <= len(sequence) <= 16 for sequence in p.banned_sequences),
            all(token in ids for sequence in p.banned_sequences for token in sequence),
            bool(drawable),
            bool(early) or not p.min_tokens,
            p.seed is None or 0 <= p.seed < 2**64,
            p.logprobs is None or 0 <= p.logprobs <= 20,
            p.prompt_logprobs is None or 0 <= p.prompt_logprobs <= 20,
            p.beam_width == 0 or beams,
            0 <= p.length_penalty <= 4,
        )
    )


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
        (SamplingParams(temperature=0, n=2, min_tokens=9, max_tokens=5), {"n", "min_tokens"}),
        (
            SamplingParams(beam_width=2, n=3, best_of=4, temperature=0.5, top_p=0.5, presence_penalty=1.0),
            {"beam_width", "best_of", "temperature", "top_p", "presence_penalty"},
        ),
    ],
)
def test_all_fields_that_contradict_others_are_named_together(params, fields):
    error = refusal(check, params)
    assert {violation.field for violation in error.violations} == fields


# One bad value at a time


BAD = [
    *[("temperature", value) for value in (-0.1, 10.1, NAN, INF, -INF, "1", None, True, 10**400, [], b"")],
    *[("top_p", value) for value in (0, 0.0, -1.0, 1.1, NAN, INF)],
    *[("top_k", value) for value in (-1, 2**32, 1.0, NAN, None)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN)],
    *[("n", value) for value in (0, -1, 17, 2**31, 1.5, NAN, None, "2", True)],
    *[("best_of", value) for value in (-1, 17, NAN)],
    *[("max_tokens", value) for value in (0, -1, 2**32, 1.0, NAN, "9")],
    *[("min_tokens", value) for value in (-1, 257, 1.0, None)],
    *[
        ("stop", value)
        for value in (
            ("",),
            ("x" * 257,),
            ("é" * 129,),
            ("x",) * 17,
            ("\ud800",),
            (b"x",),
            (None,),
            "ab",
            "",
            3,
            0,
            None,
        )
    ],
    *[("stop_token_ids", value) for value in ((VOCAB,), (-1,), (1,) * 65, (1.0,), ("1",), (2**70,), "12", 5, None)],
    *[(flag, value) for flag in limits.FLAGS for value in (None, 1, 0, "true")],
    *[("repetition_penalty", value) for value in (0, 0.0, -1.0, 10.1, NAN, INF)],
    *[(f"{kind}_penalty", value) for kind in ("presence", "frequency") for value in (-2.1, 2.1, NAN, INF, None)],
    *[
        ("logit_bias", value)
        for value in ({VOCAB: 1.0}, {-1: 1.0}, {1: NAN}, {1: INF}, {1: 100.1}, {"1": 1.0}, {1: "1"})
    ],
    *[("logit_bias", value) for value in (None, [], [(1, 1.0)], dict.fromkeys(range(301), 0.0), {1: True})],
    *[(f"{kind}_token_ids", (1,) * 4097) for kind in ("allowed", "banned")],
    *[(f"{kind}_token_ids", (VOCAB,)) for kind in ("allowed", "banned")],
    ("banned_token_ids", tuple(range(VOCAB))),
    *[
        ("banned_sequences", value)
        for value in (((),), ((1,) * 17,), ((1, VOCAB),), ((1, -1),), ((1,),) * 1025, (1,), ("ab",), None, ((None,),))
    ],
    ("banned_sequences", tuple((1, token) for token in range(VOCAB - 1)) + ((VOCAB - 1,),) * 2),
    *[("seed", value) for value in (-1, 2**64, 1.0, "s")],
    *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, 1.0, NAN)],
    *[("beam_width", value) for value in (1, 17, -1, NAN, None)],
    *[("length_penalty", value) for value in (-0.1, 4.1, NAN, INF)],
]


@pytest.mark.parametrize(
    ("field", "value"), BAD, ids=lambda value: repr(value)[:30] if not isinstance(value, int) else ""
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(InvalidArgument) as caught:
        check(dataclasses.replace(DEFAULT, **{field: value}))
    assert caught.value.field == field


TOGETHER = [
    ("best_of", {"n": 3, "best_of": 2}),
    ("n", {"n": 2, "temperature": 0.0}),
    ("n", {"n": 2, "best_of": 3, "temperature": 0.0}),
    ("best_of", {"best_of": 2, "temperature": 0.0}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("beam_width", {"n": 4, "beam_width": 3}),
    ("best_of", {"n": 2, "beam_width": 4, "best_of": 4}),
    *[(field, {"beam_width": 4, field: 0.5}) for field in limits.WITHOUT_BEAMS if field != "top_k"],
    ("top_k", {"beam_width": 4, "top_k": 5}),
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


GOOD = [
    {},
    {"temperature": 0.0},
    {"temperature": 10},
    {"top_k": 2**32 - 1},
    {"n": 16, "best_of": 16},
    {"temperature": 0.0, "n": 1, "best_of": 1},
    {"max_tokens": 2**32 - 1, "min_tokens": 2**32 - 1},
    {"min_tokens": 256},
    {"stop": ("é" * 128,) * 16},
    {"logit_bias": {0: -100.0, VOCAB - 1: 100}},
    {"allowed_token_ids": EOS, "min_tokens": 1, "ignore_eos": True},
    {"banned_token_ids": tuple(range(VOCAB - 1))},
    {"banned_sequences": ((1,) * 15 + (VOCAB - 1,), (1, 2), (3,)) + ((5, 6),) * 1021},
    {"seed": 2**64 - 1, "logprobs": 20, "prompt_logprobs": 0},
    {"beam_width": 16, "n": 16, "best_of": 16, "length_penalty": 0.0},
]


@pytest.mark.parametrize("values", GOOD)
def test_the_edges_are_allowed(values):
    params = dataclasses.replace(DEFAULT, **values)
    assert allows(params)
    check(params)


def test_every_field_has_a_limit():
    """A field added to SamplingParams without a row in limits would not be checked."""
    named = [*limits.NUMBERS, *limits.FLAGS, *limits.COUNTS]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(SamplingParams))
    assert {field for field, _ in BAD} == set(named)


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
        for _ in range(rng.choice([1, 2, 3, 5] if rng.random() < 0.997 else [1024, 1025])):
            size = rng.choice([1, 2, 16, 17] if rng.random() < 0.05 else [1, 2, 3])
            message.banned_sequences.add(ids=rng.choices(U32S[: rng.choice([-3, 17, 3, 3])], k=size))
    elif name in limits.COUNTS:
        size = rng.choice([1, 2, 10, 64, 65] if rng.random() < 0.998 else [4096, 4097])
        getattr(message, name).extend(rng.choices(U32S[: rng.choice([-3, 17])], k=size))
    elif name in limits.FLAGS:
        setattr(message, name, rng.random() < 0.5)
    elif limits.NUMBERS[name].integer:
        setattr(message, name, rng.choice(U32S) if name != "seed" else rng.getrandbits(64))
    else:
        setattr(message, name, rng.choice(FLOATS))


def mutated(data, rng):
    data = bytearray(data or b"\0")
    for _ in range(rng.choice([1, 1, 2, 4])):
        position = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[position] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[position] = rng.randrange(256)
        elif kind == 2:
            data[position:position] = rng.randbytes(rng.choice([1, 4]))
        elif position + 3 < len(data):
            del data[position : position + rng.choice([1, 3])]
    return bytes(data)


def test_a_hundred_thousand_hostile_messages():
    """Whatever bytes arrive are refused or within every limit of the oracle: nothing else, and nothing too strict."""
    rng = random.Random(20261121)
    outcomes = {"unreadable": 0, "refused": 0, "passed": 0}
    too_long = set()
    data = b""
    for i in range(100_000):
        data = mutated(data, rng) if i % 2 else random_proto(rng).SerializeToString()
        try:
            message = types_pb2.SamplingParams.FromString(data)
        except DecodeError:
            outcomes["unreadable"] += 1
            continue
        try:
            params = sampling_from_wire(message)
        except InvalidArgument as error:
            outcomes["refused"] += 1
            too_long.add(error.field)
            continue
        passed = passes(params)
        assert passed == allows(params), params
        outcomes["passed" if passed else "refused"] += 1
    assert too_long == set(limits.COUNTS) - {"logit_bias"}
    assert min(outcomes.values()) > 10_000, outcomes  # or the fuzzer has lost its aim


HOSTILE = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    10**5000,
    -(10**5000),
    0.5,
    NAN,
    INF,
    "",
    "x",
    "\ud800",
    b"x",
    (),
    [],
    {},
    object(),
]
HOSTILE += [
    ("x",),
    (1,),
    (None,),
    (NAN,),
    ((),),
    {1: 1.0},
    {None: None},
    {1: NAN},
    {1.5: 1},
    {10**5000: 1},
    complex(1, 1),
    set(),
]


def test_twenty_thousand_values_of_any_type():
    rng = random.Random(7)
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    for _ in range(20_000):
        chosen = {name: rng.choice(HOSTILE) for name in rng.sample(names, rng.choice([1, 1, 2, 4]))}
        passes(dataclasses.replace(DEFAULT, **chosen))


def test_a_beam_search_may_have_temperature_0_or_none():
    """Who is told that n > 1 at temperature 0 needs beam_width adds it, and keeps the temperature."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, beam_width=3, n=2)
        sampling_validation.validate_sampling(params, vocab_size=100)
        concrete = sampling_validation.resolve(params, prompt_len=3, context_tokens=100, seed_source=lambda: 1)
        assert (concrete.temperature, concrete.beam_width) == (1.0, 3)
