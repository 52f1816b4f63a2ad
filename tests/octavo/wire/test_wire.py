"""Plain values cross the wire unchanged, and one value has one canonical form."""

import dataclasses
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parameter_values import U32, strategy

from octavo.request import errors
from octavo.request.errors import Failure
from octavo.request.ids import RequestId, SequenceId
from octavo.request.record import Record, SequenceState, Snapshot
from octavo.request.sampling import PARAMETERS, FinishReason, SamplingParams, TokenScore
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire import public
from octavo.wire.internal import admission_from_wire, admission_of_record, admission_to_wire
from octavo.wire.public import sampling_bytes, sampling_from_wire
from octavo.wire.requests import ChatPrompt, chat_from_wire, limits_to_wire, request_hash, state_to_wire

FIELDS = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name


params = st.builds(SamplingParams, **{name: strategy(row) for name, row in PARAMETERS.items()})


@given(params)
def test_parameters_come_back_as_they_went(value):
    message = public.sampling_to_wire(value)
    assert sampling_from_wire(message) == value
    again = types_pb2.SamplingParams.FromString(message.SerializeToString())
    assert sampling_from_wire(again) == value
    assert public.sampling_from_bytes(sampling_bytes(value)) == value


@given(params, params, st.randoms())
def test_equal_parameters_have_equal_bytes_and_others_do_not(one, other, rng):
    items = list(one.logit_bias.items())
    rng.shuffle(items)
    shuffled = dataclasses.replace(one, logit_bias=dict(items))
    assert sampling_bytes(shuffled) == sampling_bytes(one)
    assert (sampling_bytes(one) == sampling_bytes(other)) == (one == other)


KNOWN = SamplingParams(temperature=0.5, max_tokens=7, seed=9, stop=("a",), logit_bias={5: 1.0, 2: -1.0})
KNOWN_BYTES = (
    "0d0000003f150000803f180025000000002801380740004a0161580060006d0000803f75000000007d00000000980109b00100bd010000803f"
    "c00101820107080215000080bf8201070805150000803f"
)


def test_bytes_of_a_known_value(root):
    """Records outlive processes: a change here is a change of the store's schema. Zero has one sign.

    They do not depend on the implementation of protobuf, of which one sorts maps downwards, the other upwards.
    """
    assert sampling_bytes(KNOWN).hex() == KNOWN_BYTES
    negative = SamplingParams(temperature=-0.0, presence_penalty=-0.0, logit_bias={1: -0.0})
    assert sampling_bytes(negative) == sampling_bytes(SamplingParams(temperature=0.0, logit_bias={1: 0.0}))
    script = (
        "from google.protobuf.internal import api_implementation as a; from octavo.wire.public import sampling_bytes;"
        f"from octavo.request.sampling import SamplingParams; print(a.Type(), sampling_bytes({KNOWN!r}).hex())"
    ).replace("mappingproxy(", "dict(")
    environ = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True, cwd=root)
    assert done.stdout.split() == ["python", KNOWN_BYTES]
    with pytest.raises(errors.HistoryLost):
        public.sampling_from_bytes(b"\xff\xff")


def test_what_is_left_out_is_the_default_and_zero_is_zero():
    assert sampling_from_wire(types_pb2.SamplingParams()) == SamplingParams()
    zeros = sampling_from_wire(types_pb2.SamplingParams(temperature=0, max_tokens=0, seed=0, logprobs=0, top_p=0))
    assert (zeros.temperature, zeros.max_tokens, zeros.seed, zeros.logprobs, zeros.top_p) == (0, 0, 0, 0, 0)


def test_recommended_values_cross_the_wire_alone():
    """What becomes of them: tests/router/streaming/test_request_preparer.py."""
    values = {"temperature": 0.5, "top_k": 40, "max_tokens": 512, "repetition_penalty": 1.5}
    for each in (values, {}):
        assert public.recommended_from_wire(public.recommended_to_wire(each)) == each
        assert sampling_from_wire(public.defaults_to_wire(each)) == SamplingParams(**each)
    beams = types_pb2.SamplingParams(beam_width=4)  # nothing is recommended beside them that says how tokens are drawn
    found = public.with_recommended(sampling_from_wire(beams), beams, values)
    assert found == SamplingParams(beam_width=4, max_tokens=512)


def test_defaults_are_written_out():
    """A receiver of another version may have other defaults."""
    assert sorted(FIELDS) == sorted(PARAMETERS)
    message = public.defaults_to_wire({})
    unset = {name for name, field in FIELDS.items() if field.has_presence and not message.HasField(name)}
    late = {row.name for row in PARAMETERS.values() if row.default is None or (row.is_late and row.most is None)}
    assert unset == late | {"best_of"}


@pytest.mark.parametrize("row", [row for row in PARAMETERS.values() if row.most is not None], ids=lambda row: row.name)
def test_a_list_over_its_limit_is_refused_before_it_is_copied(row):
    message = types_pb2.SamplingParams()
    for i in range(row.most + 1):
        if row.name == "logit_bias":
            message.logit_bias[i] = 1.0
        elif row.name == "banned_sequences":
            message.banned_sequences.add(ids=[i])
        else:
            getattr(message, row.name).append("x" if row.name == "stop" else i)
    with pytest.raises(errors.InvalidArgument) as caught:
        sampling_from_wire(message)
    assert caught.value.field == row.name


def test_a_retry_is_told_from_another_body():
    def hash_of(bias=(), **values):
        message = inference_pb2.GenerateRequest(**{"request_id": "r", "text": b"x", **values})
        for token_id, value in dict(bias).items():
            message.sampling.logit_bias[token_id] = value
        return request_hash(message, sampling_from_wire(message.sampling))

    same = hash_of({1: 1.0, 2: 2.0})
    assert same == hash_of({2: 2.0, 1: 1.0})
    assert hash_of() == hash_of(sampling=types_pb2.SamplingParams(temperature=1))
    others = [hash_of(), hash_of(text="y"), hash_of(priority=4), hash_of({1: 1.0}), hash_of(model="m"), same]
    assert len(set(others)) == len(others)


@given(st.integers(0, 16), st.text(), st.text(), st.booleans())
def test_failures(code, reason, message, retryable):
    failure = Failure(code, reason, message, retryable)
    assert public.failure_from_wire(public.failure_to_wire(failure)) == failure


def test_finish_reasons_states_and_limits_have_the_names_of_the_wire():
    for name, number in types_pb2.FinishReason.items():
        reason = public.finish_from_wire(number)
        assert reason == number == public.finish_to_wire(reason)
        assert name == f"FINISH_REASON_{'UNSPECIFIED' if reason is FinishReason.NONE else reason.name}"
    assert len(FinishReason) == len(types_pb2.FinishReason.items())
    assert public.finish_from_wire(99) is FinishReason.ERROR
    assert {state_to_wire(state) for state in SequenceState} <= set(inference_pb2.RequestState.keys())
    assert len(limits_to_wire().ListFields()) == len(inference_pb2.Limits.DESCRIPTOR.fields)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    assert chat_from_wire(chat) == ChatPrompt([("user", "hi")], True, [], [])
    chat.add_generation_prompt = False
    assert chat_from_wire(chat).begin_answer is False


logprobs = st.floats(max_value=0, width=32) | st.just(-math.inf)


@given(U32, logprobs, st.lists(st.tuples(U32, logprobs), max_size=5).map(tuple))
def test_scores(token_id, logprob, top):
    score = TokenScore(token_id, logprob, top)
    assert public.score_from_wire(public.score_to_wire(score)) == score


@pytest.mark.parametrize("deadline_ms", [0, 9_000, 900])
def test_an_admission_has_what_the_record_says(deadline_ms):
    params = SamplingParams(temperature=0.5, max_tokens=9, n=2, best_of=2, seed=7)
    record = Record(
        seq_id=SequenceId("a" * 32), request_id=RequestId("r"), body_hash=b"", state=SequenceState.RUNNING, epoch=4,
        model="m", layout="l", sampling=sampling_bytes(params), prompt_len=2, prompt_chain=0, num_branches=2,
        max_tokens=9, tenant="t", salt="s", priority=2, deadline_ms=deadline_ms, keep_on_disconnect=False, routers=(),
        finishes=(FinishReason.NONE, FinishReason.STOP),
    )  # fmt: skip
    snapshot = Snapshot(record, (1, 2), ((3,), (4, 5)), now_ms=1_000)
    message = admission_to_wire(snapshot, epoch=5, suspect=True, age_ms=500, hint=("o", 1))
    assert sampling_bytes(sampling_from_wire(message.sampling)) == record.sampling
    admission = admission_from_wire(message)
    own = admission_of_record(snapshot, epoch=5, age_ms=500)
    same = dataclasses.replace(admission, prompt=(1, 2), outputs=((3,), (4, 5)), finished_branches=[1])
    assert dataclasses.replace(own, suspect=True, prefix_owner="o", prefix_owner_tokens=1) == same
    assert (admission.seq_id, admission.epoch, admission.prompt) == ("a" * 32, 5, [1, 2])
    assert (admission.outputs, admission.finished_branches) == ([[3], [4, 5]], (1,))
    assert admission.sampling == public.sampling_from_bytes(record.sampling)
    assert (admission.salt, admission.priority, admission.suspect) == ("s", 2, True)
    assert admission.deadline_in_ms == {0: 0, 9_000: 7_500, 900: 1}[deadline_ms]
