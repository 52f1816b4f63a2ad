"""Whatever a body holds, the answer is JSON, and no error is the server's own."""

from contextlib import suppress

import pytest
from effort import draws
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameter_values import beyond, inside

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import PARAMETERS
from octavo.wire.public import sampling_from_wire
from router.http.bodies.chat_body import read_chat
from router.http.bodies.completion_body import read_completion
from router.http.bodies.json_body import parse_object

NAMES = [row.http for row in PARAMETERS.values() if row.http]
NAMES += ["model", "prompt", "messages", "max_tokens", "max_completion_tokens", "best_of", "logprobs", "top_logprobs"]
NAMES += ["stream", "stream_options", "echo", "suffix", "tools", "tool_choice", "user", "response_format", "request_id"]
NAMES += ["priority", "on_disconnect", "return_token_ids"]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "7", "x"]), inner, max_size=4
        ),
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)
READERS = [read_completion, read_chat]


@pytest.mark.parametrize("read", READERS)
@settings(max_examples=draws(60, 300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODIES)
def test_a_body_is_read_or_refused(read, body):
    base = {"prompt": "x"} if read is read_completion else {"messages": [{"role": "user", "content": "x"}]}
    for each in (body, {**base, **body}):
        with suppress(InvalidArgument):
            assert read(each).request.SerializeToString()


@settings(max_examples=draws(60, 300), deadline=None)
@given(st.binary(max_size=60))
def test_bytes_are_an_object_or_refused(data):
    with suppress(InvalidArgument):
        assert isinstance(parse_object(data), dict)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("row", [row for row in PARAMETERS.values() if row.http], ids=lambda row: row.name)
def test_a_parameter_is_taken_or_refused(read, row):
    base = {"prompt": "x"} if read is read_completion else {"messages": [{"role": "user", "content": "x"}]}
    for value in inside(row):
        written = {str(token): bias for token, bias in value.items()} if row.name == "logit_bias" else value
        listed = list(written) if isinstance(written, tuple) else written
        params = sampling_from_wire(read({**base, row.http: listed}).request.sampling)
        assert getattr(params, row.name) == pytest.approx(value)
    for value in beyond(row) if row.allowed else []:
        if value is None or value == 1.0 or (row.name in ("seed", "top_k") and value == -1):
            continue  # left out; whole; signed, as OpenAI has it; none, as vLLM has it
        wider = row.name in ("seed", "top_k")
        with pytest.raises(InvalidArgument, match=f"^{row.http}: .*{'' if wider else row.allowed}"):
            read({**base, row.http: value})
