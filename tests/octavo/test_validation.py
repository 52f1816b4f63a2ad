"""The validator against an oracle, which is the contract written a second time, and against everything else."""

import dataclasses
import math
import random

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from octavo import limits, validation, wire
from octavo.errors import InvalidArgument
from octavo.sampling import SamplingParams
from octavo.v1 import types_pb2

VOCAB, CONTEXT, EOS = 100, 64, (2,)
NAN, INF = math.nan, math.inf
DEFAULT = SamplingParams()


def check(params, vocab_size=VOCAB, context_tokens=CONTEXT, eos_token_ids=EOS):
    validation.validate_sampling(
        params, vocab_size=vocab_size, context_tokens=context_tokens, eos_token_ids=eos_token_ids
    )


def allows(p, vocab=VOCAB, context=CONTEXT, eos=EOS):
    """The contract, in the plainest words; for parameters whose values have the right types."""
    ids = range(vocab)
    default_max = context if p.max_tokens is None else p.max_tokens
    drawable = set(p.allowed_token_ids or ids) - set(p.banned_token_ids)
    early = drawable - set(p.stop_token_ids) - (set() if p.ignore_eos else set(eos))
    beams = (
        2 <= p.beam_width <= 16
        and p.n <= p.beam_width
        and p.best_of in (0, p.n)
        and (p.temperature, p.top_p, p.top_k, p.min_p) == (1, 1, 0, 0)
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
            p.max_tokens is None or 1 <= p.max_tokens <= context,
            0 <= p.min_tokens <= default_max,
            len(p.stop) <= 16 and all(1 <= len(text.encode()) <= 256 for text in p.stop),
            len(p.stop_token_ids) <= 64 and all(token in ids for token in p.stop_token_ids),
            0 < p.repetition_penalty <= 10,
            -2 <= p.presence_penalty <= 2,
            -2 <= p.frequency_penalty <= 2,
            len(p.logit_bias) <= 300,
            all(token in ids and -100 <= bias <= 100 for token, bias in p.logit_bias.items()),
            len(p.allowed_token_ids) <= 4096 and all(token in ids for token in p.allowed_token_ids),
            len(p.banned_token_ids) <= 4096 and all(token in ids for token in p.banned_token_ids),
            bool(drawable),
            bool(early) or not p.min_tokens,
            p.seed is None or 0 <= p.seed < 2**64,
            p.logprobs is None or 0 <= p.logprobs <= 20,
            p.prompt_logprobs is None or 0 <= p.prompt_logprobs <= 20,
            p.beam_width == 0 or beams,
            0 <= p.length_penalty <= 4,
        )
    )


def refusal(call, *args, **kwargs):
    """The InvalidArgument a call raises, None if it passes. Whatever else it raises fails the test."""
    try:
        call(*args, **kwargs)
    except InvalidArgument as error:
        return error
    return None


def passes(params):
    error = refusal(check, params)
    if error is None:
        return True
    assert error.field
    assert error.message.startswith(error.field + ": ")
    assert len(error.message) < 300
    return False


# One bad value at a time


BAD = [
    *[("temperature", value) for value in (-0.1, 10.1, NAN, INF, -INF, "1", None, True, 10**400, [], b"")],
    *[("top_p", value) for value in (0, 0.0, -1.0, 1.1, NAN, INF)],
    *[("top_k", value) for value in (-1, 2**32, 1.0, NAN, None)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN)],
    *[("n", value) for value in (0, -1, 17, 2**31, 1.5, NAN, None, "2", True)],
    *[("best_of", value) for value in (-1, 17, NAN)],
    *[("max_tokens", value) for value in (0, -1, CONTEXT + 1, 2**32 - 1, 1.0, NAN, "9")],
    *[("min_tokens", value) for value in (-1, CONTEXT + 1, 1.0, None)],
    *[
        ("stop", value)
        for value in (("",), ("x" * 257,), ("é" * 129,), ("x",) * 17, ("\ud800",), (b"x",), (None,), "ab", 3)
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
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("beam_width", {"n": 4, "beam_width": 3}),
    ("best_of", {"n": 2, "beam_width": 4, "best_of": 4}),
    *[(field, {"beam_width": 4, field: 0.5}) for field in limits.WITHOUT_BEAMS if field != "top_k"],
    ("top_k", {"beam_width": 4, "top_k": 5}),
    ("banned_token_ids", {"allowed_token_ids": (3, 4), "banned_token_ids": (4, 3)}),
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
    {"max_tokens": CONTEXT, "min_tokens": CONTEXT},
    {"stop": ("é" * 128,) * 16},
    {"logit_bias": {0: -100.0, VOCAB - 1: 100}},
    {"allowed_token_ids": EOS, "min_tokens": 1, "ignore_eos": True},
    {"banned_token_ids": tuple(range(VOCAB - 1))},
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
U32S = [0, 1, 2, 3, 4, 15, 16, 17, 20, 21, CONTEXT - 1, CONTEXT, CONTEXT + 1, VOCAB - 1, VOCAB, 2**31, 2**32 - 1]
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
            params = wire.sampling_from_wire(message)
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


# Prompts

tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT - 1)


def check_prompt(ids, params=DEFAULT, **changed):
    validation.validate_prompt(ids, params, **{"vocab_size": VOCAB, "context_tokens": CONTEXT, **changed})


@given(tokens, st.none() | st.integers(1, CONTEXT), st.integers(0, CONTEXT))
def test_what_passes_fits_the_context_and_resolves(ids, max_tokens, min_tokens):
    params = dataclasses.replace(DEFAULT, max_tokens=max_tokens, min_tokens=min_tokens)
    if not passes(params):
        return
    room = CONTEXT - len(ids)
    error = refusal(check_prompt, ids, params)
    if error is not None:
        assert error.field == ("min_tokens" if max_tokens is None else "max_tokens")
        assert (min_tokens if max_tokens is None else max_tokens) > room
        return
    resolved = validation.resolve(params, prompt_len=len(ids), context_tokens=CONTEXT, seed_source=lambda: 2**64 + 5)
    assert 1 <= resolved.max_tokens <= room
    assert resolved.min_tokens <= resolved.max_tokens
    assert (resolved.seed, resolved.best_of) == (5, 1)
    assert passes(resolved)
    assert validation.resolve(resolved, prompt_len=len(ids), context_tokens=CONTEXT, seed_source=int) == resolved


def test_the_default_of_max_tokens_is_256_where_there_is_room():
    resolved = validation.resolve(DEFAULT, prompt_len=3, context_tokens=10_000, seed_source=int)
    assert resolved.max_tokens == 256
    assert validation.resolve(DEFAULT, prompt_len=9_900, context_tokens=10_000, seed_source=int).max_tokens == 100


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "empty"),
        ([1] * CONTEXT, "no room"),
        ([1, VOCAB], "position 1"),
        ([-1], "not below 100"),
        ([2**40], "position 0"),
        ([10**5000], "huge"),
        ([1.0], "float"),
        (["secret"], "str"),
        ([None], "NoneType"),
    ],
)
def test_bad_prompts(ids, says):
    with pytest.raises(InvalidArgument, match=says) as caught:
        check_prompt(ids)
    assert caught.value.field == "token_ids"
    assert "secret" not in str(caught.value)


def test_a_prompt_that_is_too_long_says_the_numbers():
    with pytest.raises(InvalidArgument) as caught:
        check_prompt([1] * 120, dataclasses.replace(DEFAULT, max_tokens=9000), context_tokens=8192)
    assert str(caught.value) == "max_tokens: 9000 + prompt 120 exceeds this model's context of 8192"


@given(st.binary(max_size=40))
def test_text_is_the_text_or_refused(data):
    error = refusal(validation.validate_text, data, "text", context_tokens=2)
    if error is None:
        assert validation.validate_text(data, "text", context_tokens=2).encode() == data
    else:
        assert error.field == "text"
        assert not 0 < len(data) <= 32 or data.decode(errors="replace").encode() != data


@pytest.mark.parametrize("value", [None, "text", bytearray(b"x"), 3])
def test_text_must_be_bytes(value):
    with pytest.raises(InvalidArgument):
        validation.validate_text(value, "text", context_tokens=10)


def test_the_place_where_text_stops_being_utf8_is_named():
    with pytest.raises(InvalidArgument, match="byte 2"):
        validation.validate_text(b"ab\xff", "text", context_tokens=10)


def test_chats():
    turns = validation.validate_chat([("system", b"be brief"), ("user", b"")], context_tokens=10)
    assert turns == [{"role": "system", "content": "be brief"}, {"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "chat.messages"),
        ([("user", b"")] * 1025, "chat.messages"),
        ([("user", b"x" * 100), ("user", b"x" * 61)], "chat.messages"),
        ([("", b"x")], "chat.messages[0].role"),
        ([("user", b"x"), ("r" * 65, b"x")], "chat.messages[1].role"),
        ([("a\nb", b"x")], "chat.messages[0].role"),
        ([("user", b"\xff")], "chat.messages[0].content"),
    ],
)
def test_bad_chats(messages, field):
    with pytest.raises(InvalidArgument) as caught:
        validation.validate_chat(messages, context_tokens=10)
    assert caught.value.field == field


@given(st.text(max_size=140))
def test_request_ids(text):
    good = 1 <= len(text) <= 128 and all(" " <= character <= "~" for character in text)
    assert (refusal(validation.validate_request_id, text) is None) == good


@pytest.mark.parametrize(
    ("text", "good"), [("a" * 128, True), ("a" * 129, False), ("a\n", False), (" ~", True), (None, False)]
)
def test_edges_of_request_ids(text, good):
    assert (refusal(validation.validate_request_id, text) is None) == good


# Admissions

ADMISSION = {
    "seq_id": "0123456789abcdef" * 2,
    "epoch": 1,
    "prompt": [1, 2, 3],
    "params": dataclasses.replace(DEFAULT, max_tokens=4, seed=1, n=2, best_of=2),
    "outputs": [[5], [6, 7]],
    "finished_branches": [1],
    "salt": "tenant",
    "priority": 3,
    "deadline_in_ms": 0,
}


def admit(**changed):
    values = {**ADMISSION, "vocab_size": VOCAB, "context_tokens": CONTEXT, "eos_token_ids": EOS, **changed}
    validation.validate_admission(**values)


def test_good_admissions():
    admit()
    admit(outputs=[], finished_branches=[])
    admit(outputs=[[1] * 4, []], deadline_in_ms=1, epoch=2**64 - 1, priority=1, salt="")


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        *[("seq_id", {"seq_id": value}) for value in ("", "x" * 32, "0" * 31, "0" * 33, "A" * 32, None)],
        *[("epoch", {"epoch": value}) for value in (0, -1, 2**64, 1.0, None)],
        *[("prompt", {"prompt": value}) for value in ([], [VOCAB], [1] * CONTEXT, [-1])],
        *[("priority", {"priority": value}) for value in (0, 5, -1)],
        *[("deadline_in_ms", {"deadline_in_ms": value}) for value in (-1, 2**63)],
        *[("salt", {"salt": value}) for value in ("x" * 129, "é", None)],
        *[("outputs", {"outputs": value}) for value in ([[]], [[], [], []])],
        ("outputs[1]", {"outputs": [[], [1] * 5]}),
        ("outputs[0]", {"outputs": [[VOCAB], []]}),
        *[("finished_branches", {"finished_branches": value}) for value in ([2], [0, 0], [-1], None)],
        ("sampling.seed", {"params": dataclasses.replace(ADMISSION["params"], seed=None)}),
        ("sampling.max_tokens", {"params": dataclasses.replace(ADMISSION["params"], max_tokens=None)}),
        ("max_tokens", {"params": dataclasses.replace(ADMISSION["params"], max_tokens=CONTEXT - 2)}),
        ("temperature", {"params": dataclasses.replace(ADMISSION["params"], temperature=NAN)}),
    ],
)
def test_bad_admissions(field, changed):
    with pytest.raises(InvalidArgument) as caught:
        admit(**changed)
    assert caught.value.field == field
