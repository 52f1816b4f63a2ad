"""Clients that leave, streams that break, and what goes on with them."""

import json

import pytest

from octavo.request.record import SequenceState
from octavo.request.sampling import SamplingParams
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer

PROMPT = list(range(3, 40))
LONG = {"prompt": PROMPT, "temperature": 0, "max_tokens": 400, "stream": True}
PATH = "/v1/completions"


def text_of(*streams):
    """The text of some pieces of a stream."""
    events = [each for body in streams for each in body.decode().split("\n\n") if each.startswith("data: {")]
    return "".join(choice["text"] for each in events for choice in json.loads(each[6:]).get("choices", ()))


def last_token(body):
    return json.loads(body.decode().split("data: ")[-1])["resume_token"]


async def begin(connect, world, body=LONG, **headers):
    """Begins a stream; its connection, its request id and what has come of it."""
    connection = await connect()
    connection.send("POST", PATH, body, **headers)
    status, headers = await connection.head()
    assert status == 200
    return connection, headers["x-request-id"], await connection.chunk()


@pytest.fixture
def text(oracle):
    ((tokens, _, _),) = oracle.outputs(PROMPT, SamplingParams(temperature=0.0, max_tokens=400))
    return ByteTokenizer().decode(tokens)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_leaving_client_ends_its_request_soon(world, connect, stream):
    """Its grace period would run to the end."""
    await world.start(router={"grace_ms": 60_000})
    connection = await connect()
    connection.send("POST", PATH, {**LONG, "max_tokens": 5000, "ignore_eos": True, "stream": stream})
    await world.until(lambda: any(len(e.journals[0]) > 3 for e in world.entries))
    (entry,) = world.entries
    num_at_once = len(entry.journals[0])
    await connection.close()
    await world.until(lambda: entry.record.state.ended, 60.0)
    assert entry.record.state is SequenceState.CANCELLED
    assert len(entry.journals[0]) < num_at_once + 2500
    await world.until(lambda: not world.routers[0]._opener.num_sessions)


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_bad_name_is_said_to_be_in_its_header(world, call, path):
    await world.start()
    asked = {"prompt": "x"} if path == PATH else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    asked = {"input": "x"} if path == "/v1/responses" else asked
    for more, headers in (({}, {"idempotency-key": "x" * 129}), ({"request_id": "x" * 129}, {"idempotency-key": "y"})):
        answer = await call("POST", path, {**asked, **more}, **headers)
        field = "request_id" if more else "Idempotency-Key"
        assert answer.status == 400
        assert answer.object["error"]["message"].startswith(f"{field}: must be 1 to 128"), answer.body


@pytest.mark.parametrize("kept", [{"request_id": "mine"}, {"on_disconnect": "keep"}])
async def test_a_named_or_kept_request_goes_on(world, connect, call, text, kept):
    await world.start(router={"grace_ms": 30_000})
    connection, request_id, _ = await begin(connect, world, {**LONG, **kept})
    await connection.close()
    answer = await call("GET", f"/v1/requests/{request_id}")
    assert answer.object["choices"][0]["text"] == text
    assert answer.object["choices"][0]["finish_reason"] == "length"


async def test_an_ending_router_tells_its_streams(world, connect, call, text):
    await world.start(routers=2, step_s=0.003)
    connection, request_id, body = await begin(connect, world)
    await world.stop_router(world.routers[0])
    while piece := await connection.chunk():
        body += piece
    assert not body.endswith(b"[DONE]\n\n")
    last = json.loads(body.decode().strip().split("data: ")[-1])
    assert last["error"]["code"] == "draining"
    assert last["id"] == request_id
    rest = await call(
        "GET", f"/v1/requests/{request_id}?stream=true&after={last_token(body[: body.rindex(b'data: ')])}"
    )
    assert text_of(body, rest.body) == text


async def test_a_record_is_read_and_cancelled(world, connect, call):
    await world.start()
    connection, request_id, _ = await begin(connect, world, {**LONG, "max_tokens": 5000, "ignore_eos": True})
    found = (await call("GET", f"/v1/requests/{request_id}?wait=false")).object
    assert (found["id"], found["state"]) == (request_id, "running")
    assert found["usage"]["prompt_tokens"] == len(PROMPT)
    assert found["timeline"][0]["after_ms"] == 0
    ended = await call("DELETE", f"/v1/requests/{request_id}")
    assert ended.object == {"id": request_id, "object": "request", "cancelled": True}
    body = b""
    while piece := await connection.chunk():
        body += piece
    assert '"finish_reason":"cancelled"' in body.decode()
    assert (await call("GET", f"/v1/requests/{request_id}?wait=false")).object["state"] == "cancelled"


MISSING = [
    ("GET", "/v1/requests/unknown", 404),
    ("GET", "/v1/requests/unknown?wait=false", 404),
    ("DELETE", "/v1/requests/unknown", 404),
    ("GET", "/v1/requests/x?stream=maybe", 400),
    ("GET", "/v1/requests/x?other=1", 400),
    ("GET", "/v1/requests/x?stream=true&after=zzzz", 400),
    ("GET", "/v1/requests/x?after=1", 400),
    ("GET", "/v1/requests/%ff%0a", 400),
    ("POST", "/v1/requests/x", 405),
    ("GET", "/v1/completions", 405),
    ("POST", "/v1/embeddings", 400),
    ("GET", "/v1/embeddings", 405),
    ("POST", "/v2/score", 404),
    ("GET", "/", 404),
    ("GET", "/v1/models/gpt-5", 404),
    ("OPTIONS", "/v1/models", 405),
]


async def test_missing_things_have_errors_in_one_shape(world, call):
    await world.start()
    for method, path, status in MISSING:
        answer = await call(method, path, {} if method == "POST" else None)
        assert answer.status == status, path
        assert answer.error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("GET", "/v1/completions", "this path takes POST"),
        ("POST", "/v1/chat/completion", "no such path; did you mean /v1/chat/completions?"),
        ("GET", "/", "no such path"),
    ],
)
async def test_a_wrong_path_or_method_is_told_what_there_is(world, call, method, path, says):
    await world.start()
    answer = await call(method, path, {} if method == "POST" else None)
    assert answer.error["message"] == f"{method} {path}: {says}"


async def test_models_and_health(world, call):
    await world.worker()
    await world.router(model_aliases=("chat=fake",))
    assert (await call("GET", "/health")).status in (200, 503)
    await world.ready()
    await world.until(lambda: world.routers[0].listeners.public_health.is_serving())
    health = await call("GET", "/health", **{"x-request-id": "probe-7"})
    assert (health.object, health.headers["x-request-id"]) == ({"status": "serving"}, "probe-7")
    listed = (await call("GET", "/v1/models")).object
    assert listed["object"] == "list"
    assert [(model["id"], model["root"]) for model in listed["data"]] == [("fake", "fake"), ("chat", "fake")]
    assert (await call("GET", "/v1/models/chat")).object["max_model_len"] > 0


SAID = (
    '<think>Hm.</think>Look: <tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>\n'
    "<tool_call>zzz</tool_call>"
)


def joined_message(chunks):
    """The message that the chunks of a stream join to, by the rules of OpenAI's clients."""
    message, calls = {}, {}
    for name, value in (item for chunk in chunks for choice in chunk["choices"] for item in choice["delta"].items()):
        if name == "tool_calls":
            for call in value:
                known = calls.setdefault(call["index"], {"function": {"arguments": ""}})
                arguments = known["function"]["arguments"] + call["function"]["arguments"]
                function = known["function"] | call["function"] | {"arguments": arguments}
                known |= {key: call[key] for key in ("id", "type") if key in call} | {"function": function}
        elif name != "role":
            message[name] = message.get(name, "") + value
    return message | ({"tool_calls": list(calls.values())} if calls else {})


async def test_calls_and_reasoning_are_shown_again_from_any_place_on(world, call, templates, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "chat_template", "</think>", raising=False)
    await world.start(routers=2)
    tool = {"type": "function", "function": {"name": "a"}}
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": 200, "request_id": "mine"}
    asked |= {"structured_outputs": {"choice": [SAID]}, "stream": True, "stream_options": {"include_usage": True}}
    chunks = (await call("POST", "/v1/chat/completions", asked)).chunks
    message = joined_message(chunks)
    assert (message["reasoning"], message["content"]) == ("Hm.", "Look:\n<tool_call>zzz</tool_call>")
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == ['{"x": "</tool_call>"}']
    whole = (await call("GET", "/v1/requests/mine?chat=true", router=1)).object
    shown = whole["choices"][0]["message"]
    assert {name: shown[name] for name in message} == message
    assert whole["usage"] == chunks[-1]["usage"]
    for place in range(0, len(SAID), 3):
        rest = (await call("GET", f"/v1/requests/mine?chat=true&stream=true&after={place}", router=1)).chunks
        assert message["content"].endswith(joined_message(rest).get("content", ""))
        assert rest[-1]["usage"] == chunks[-1]["usage"]
    for i, chunk in enumerate(chunks[:-1]):
        query = f"chat=true&stream=true&after={chunk['resume_token']}"
        rest = (await call("GET", f"/v1/requests/mine?{query}", router=1)).chunks
        assert joined_message([*chunks[: i + 1], *rest]) == message
