import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.text_fields import find_bad_text

GENERATE = inference_pb2.GenerateRequest.DESCRIPTOR


def request():
    turns = [inference_pb2.ChatMessage(role="user", content=text) for text in ("one", "marked")]
    return inference_pb2.GenerateRequest(
        model="m",
        chat=inference_pb2.Chat(messages=turns),
        sampling=types_pb2.SamplingParams(stop=["x", "stop"], seed=2**63, temperature=0.5, logit_bias={7: 1.0}),
    )


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"marked", b"mar\xffed", "chat.messages[1].content"),
        (b"stop", b"s\xc3op", "sampling.stop[1]"),
        (b"user", b"\xe2\x82er", "chat.messages[0].role"),
    ],
)
def test_the_path_names_the_field(before, after, path):
    data = request().SerializeToString()
    assert find_bad_text(GENERATE, data) is None
    bad = find_bad_text(GENERATE, data.replace(before, after, 1))
    assert bad.field == path
    assert "UTF-8" in bad.description
    data = inference_pb2.GenerateRequest(raw_text=b"\xff").SerializeToString()  # bytes may hold anything
    assert find_bad_text(GENERATE, data) is None


@given(st.binary(max_size=64), st.integers(0, 200))
def test_bytes_that_are_no_message_find_nothing_or_a_field(junk, at):
    data = request().SerializeToString()
    find_bad_text(GENERATE, data[:at] + junk + data[at:])
