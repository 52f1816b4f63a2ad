"""Prompts, texts, chats, request ids, admissions: what is allowed, and which field an error names."""

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from refusals import refusal

from octavo.request import sampling_validation, validation
from octavo.request.errors import InvalidArgument
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams

VOCAB, CONTEXT, EOS = 100, 64, (2,)
DEFAULT = SamplingParams()

tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT - 1)


def check_sampling(params):
    sampling_validation.validate_sampling(params, vocab_size=VOCAB, eos_token_ids=EOS)


def check_prompt(ids):
    validation.validate_prompt(ids, vocab_size=VOCAB, context_tokens=CONTEXT)


def resolve(params, prompt_len, context=CONTEXT, seed=0):
    return sampling_validation.resolve(
        params, prompt_len=prompt_len, context_tokens=context, seed_source=lambda: 2**64 + seed
    )


@given(tokens, st.none() | st.integers(1, 2**32 - 1), st.integers(0, 300), st.sampled_from([CONTEXT, 10_000]))
def test_what_passes_resolves_to_what_fits_the_context(ids, max_tokens, min_tokens, context):
    params = dataclasses.replace(DEFAULT, max_tokens=max_tokens, min_tokens=min_tokens)
    if refusal(check_sampling, params):
        return
    check_prompt(ids)
    resolved = resolve(params, len(ids), context, 5)
    assert resolved.max_tokens == min(context - len(ids), 256 if max_tokens is None else max_tokens)
    assert resolved.min_tokens == min(min_tokens, resolved.max_tokens)
    assert (resolved.seed, resolved.best_of) == (5, 1)
    check_sampling(resolved)
    assert resolve(resolved, len(ids), context) == resolved


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "empty"),
        ([1] * 64, "^token_ids: a prompt of 64 leaves no room in this model's context of 64; shorten it$"),
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


@given(st.binary(max_size=40))
def test_text_is_the_text_or_refused(data):
    error = refusal(validation.validate_text, data, "text", context_tokens=2)
    if error is None:
        assert validation.validate_text(data, "text", context_tokens=2).encode() == data
    else:
        assert error.field == "text"
        assert not 0 < len(data) <= 32 or data.decode(errors="replace").encode() != data


@pytest.mark.parametrize(
    ("value", "says"),
    [
        *[(value, "must be text") for value in (None, bytearray(b"x"), 3, ["x"])],
        ("é" * 9, "18 bytes cannot fit"),  # limits count bytes of UTF-8
        (b"ab\xff", "is not UTF-8 at byte 2"),
        ("ab\ud800", "has no UTF-8 form at character 2"),
    ],
)
def test_bad_texts(value, says):
    for text in ("é", "é".encode()):
        assert validation.validate_text(text, "text", context_tokens=1) == "é"
    with pytest.raises(InvalidArgument, match=f"^text: {says}"):
        validation.validate_text(value, "text", context_tokens=1)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "chat.messages"),
        ([("user", b"")] * 1025, "chat.messages"),
        ([("user", b"x" * 100), ("user", b"x" * 61)], "chat.messages"),
        ([("", b"x")], "chat.messages[0].role"),
        ([("user", b"x"), ("r" * 65, b"x")], "chat.messages[1].role"),
        ([("a\nb", b"x")], "chat.messages[0].role"),
        ([("user", b"\xff")], "chat.messages[0].raw_content"),
        ([("user", "x"), ("user", None)], "chat.messages[1].content"),
    ],
)
def test_bad_chats(messages, field):
    turns = validation.validate_chat([("system", b"be brief"), ("user", b"")], context_tokens=10)
    assert turns == [("system", "be brief"), ("user", "")]
    assert validation.validate_chat([("user", b"x" * 160)], context_tokens=10)  # just as long as it may be
    with pytest.raises(InvalidArgument) as caught:
        validation.validate_chat(messages, context_tokens=10)
    assert caught.value.field == field


@given(st.text(max_size=140))
@example("a" * 128)
@example("a" * 129)
@example("a\n")
@example(" ~")
def test_request_ids(text):
    good = 1 <= len(text) <= 128 and all(" " <= character <= "~" for character in text)
    assert (refusal(validation.validate_request_id, text) is None) == good
    assert refusal(validation.validate_request_id, None)


# Admissions

ADMISSION = {
    "seq_id": "0123456789abcdef" * 2,
    "epoch": 1,
    "prompt": [1, 2, 3],
    "sampling": dataclasses.replace(DEFAULT, max_tokens=4, seed=1, n=2, best_of=2),
    "outputs": [[5], [6, 7]],
    "finished_branches": [1],
    "salt": "tenant",
    "priority": 3,
    "deadline_in_ms": 0,
}


def admit(**changed):
    admission = Admission(**{**ADMISSION, **changed})
    validation.validate_admission(admission, vocab_size=VOCAB, context_tokens=CONTEXT, eos_token_ids=EOS)


def test_good_admissions():
    admit()
    admit(outputs=[], finished_branches=[])
    admit(outputs=[[1] * 4, []], deadline_in_ms=1, epoch=2**64 - 1, priority=1, salt="")


WRONG = {
    "seq_id": ["", "x" * 32, "0" * 31, "0" * 33, "A" * 32, None],
    "epoch": [0, -1, 2**64, 1.0, None],
    "prompt": [[], [VOCAB], [1] * CONTEXT, [-1]],
    "priority": [0, 5, -1],
    "deadline_in_ms": [-1, 2**63],
    "salt": ["x" * 129, "é", None],
    "outputs": [[[]], [[], [], []]],
    "finished_branches": [[2], [0, 0], [-1], None],
}


def sampled(**changes):
    return dataclasses.replace(ADMISSION["sampling"], **changes)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        *[(name, {name: value}) for name, values in WRONG.items() for value in values],
        ("outputs[1]", {"outputs": [[], [1] * 5]}),
        ("outputs[0]", {"outputs": [[VOCAB], []]}),
        ("sampling.seed", {"sampling": sampled(seed=None)}),
        ("sampling.max_tokens", {"sampling": sampled(max_tokens=None)}),
        ("outputs[1]", {"sampling": sampled(max_tokens=CONTEXT), "outputs": [[1] * 61, [1] * 62]}),
        ("temperature", {"sampling": sampled(temperature=math.nan)}),
    ],
)
def test_bad_admissions(field, changed):
    with pytest.raises(InvalidArgument) as caught:
        admit(**changed)
    assert caught.value.field == field
