"""/v1/responses: whole, in numbered events, in the background, on any router, and gone."""

import json
import zlib
from types import SimpleNamespace

import pytest
from response_events import named_events

from octavo.request.errors import InvalidArgument
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.text.stop import TextStream
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.v1 import inference_pb2
from router.http.chats.chat_writer import ChatWriter
from router.http.responses.response_body import read_response
from router.http.responses.response_events import NO_EVENTS, ResponseEvents
from router.http.responses.response_notes import MAX_BYTES, ResponseNotes
from router.http.responses.stored_responses import StoredResponses
from router.tools.output_forms import OutputForms

PATH = "/v1/responses"
ASKED = {"input": "Hi", "temperature": 0, "max_output_tokens": 300, "ignore_eos": True}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"where": "Oslo"}}\n</tool_call>'


async def test_a_background_response_runs_alone_and_is_cancelled_and_deleted(world, call, templates):
    """It is kept for as long as the operator says, and its name also when it is deleted."""
    day = 24 * 3600 * 1000
    await world.start(routers=2, router={"responses_retain_s": day // 1000})
    queued = (await call("POST", PATH, {**ASKED, "background": True})).object
    assert (queued["status"], queued["output"], queued["background"]) == ("queued", [], True)
    path = f"{PATH}/{queued['id']}"
    await world.until(lambda: world.entry(queued["id"]).record.state.ended)
    assert (await call("GET", path, router=1)).object["status"] == "incomplete"
    assert (await call("POST", f"{path}/cancel", router=1)).object["status"] == "incomplete"
    other = (await call("POST", PATH, {**ASKED, "store": False})).object["id"]
    left = [world.entry(name).expires_ms - world.state.now_ms() for name in (queued["id"], other)]
    assert day - 60_000 < left[0] <= day and left[1] <= 600_000
    assert (await call("DELETE", path, router=1)).object == {"id": queued["id"], "object": "response", "deleted": True}
    assert (await call("GET", path)).status == 404
    again = await call("POST", PATH, ASKED, **{"idempotency-key": queued["id"].removeprefix("resp_")})
    assert (again.status, again.error["code"]) == (409, "request_exists")


async def test_a_conversation_goes_on_from_any_router(world, call, templates, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "chat_template", "<think> {{ messages }}", raising=False)
    await world.start(routers=2)
    long = "Hi " * 20
    asked = {**ASKED, "input": long, "instructions": "Be brief", "metadata": {"a": "b"}}
    first = (await call("POST", PATH, asked)).object
    assert len(templates) == 1, "it is tokenized once"
    text = first["output"][0]["content"][0]["text"]
    asked = {**ASKED, "input": "And?", "previous_response_id": first["id"]}
    second = (await call("POST", PATH, asked, router=1)).object
    assert second["previous_response_id"] == first["id"]
    assert (first["metadata"], second["metadata"]) == ({"a": "b"}, {})
    asked = {**ASKED, "input": "So?", "previous_response_id": second["id"], "max_output_tokens": 3}
    third = (await call("POST", PATH, asked)).object
    cached = [each["usage"]["input_tokens_details"]["cached_tokens"] for each in (first, third)]
    assert cached[0] == 0 < cached[1]
    assert (await call("GET", f"{PATH}/{third['id']}", router=1)).object == third
    assert templates[0].messages == [("system", "Be brief"), ("user", long)]
    again = second["output"][0]["content"][0]["text"]
    turns = [("user", long), ("assistant", text), ("user", "And?"), ("assistant", again), ("user", "So?")]
    assert templates[-1].messages == turns
    items = (await call("GET", f"{PATH}/{second['id']}/input_items")).object
    assert [item["content"][0]["text"] for item in items["data"]] == ["And?"]
    gone = await call("POST", PATH, {**ASKED, "previous_response_id": "resp_never"})
    assert (gone.status, gone.error["code"]) == (404, "previous_response_not_found")


async def test_what_is_not_stored_is_not_fetched_but_its_stream_goes_on(world, call, templates):
    await world.start(routers=2)
    first = named_events((await call("POST", PATH, {**ASKED, "store": False, "stream": True})).body)
    name = first[0]["response"]["id"]
    kinds = [event["type"].removeprefix("response.") for event in first]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert first[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert first[-1]["response"]["usage"]["output_tokens"] == 300
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert (await call(method, f"{PATH}/{name}{path}")).status == 404
    assert (await call("POST", PATH, {**ASKED, "previous_response_id": name})).status == 404
    for router in (0, 1):
        for after in (4, len(first) + 5):
            rest = await call("GET", f"{PATH}/{name}?stream=true&starting_after={after}", router=router)
            assert named_events(rest.body) == first[after + 1 :]


async def test_a_repeated_call_gets_the_same_response(templates, call, post):
    first = (await post(PATH, ASKED, **{"idempotency-key": "mine"})).object
    assert first["id"] == "resp_mine"
    assert (await post(PATH, {**ASKED, "metadata": {"x": "y"}}, **{"idempotency-key": "mine"})).object == first
    completion = await post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "request_id": "resp_x"})
    assert completion.status == 200
    assert (await call("GET", f"{PATH}/resp_x")).status == 404


CHANNELS = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
CHANNELS += "<|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Yes"


@pytest.mark.parametrize(
    ("text", "finish", "kinds", "status"),
    [
        (f"I look. {CALL}", FinishReason.STOP, ["message", "function_call"], "completed"),
        (f"{CALL}\n{CALL} done", FinishReason.STOP, ["function_call", "function_call", "message"], "completed"),
        (CALL[:-20], FinishReason.LENGTH, ["function_call"], "incomplete"),
        ("", FinishReason.STOP, ["message"], "completed"),
        ("é plain", FinishReason.CANCELLED, ["message"], "cancelled"),
        (CHANNELS, FinishReason.STOP, ["reasoning", "function_call", "message"], "completed"),
    ],
)
def test_events_do_not_depend_on_how_the_tokens_came(text, finish, kinds, status):
    asked, tokenizer = read_response({"input": "Hi", "tools": [TOOL]}), ByteTokenizer()
    model = SimpleNamespace(tokenizer=tokenizer)
    model.text_stream = lambda params: TextStream.of_branch(tokenizer.detokenizer(), params, ())
    forms = OutputForms("harmony", "harmony") if text == CHANNELS else OutputForms()
    notes = ResponseNotes(created_at=1, model="m", shown=asked.shown)
    notes.note_division(forms.division(tokenizer, asked.answer.tools))
    notes = ResponseNotes.from_bytes(notes.to_bytes())
    tokens = tokenizer.encode(text)

    def stream(size, after=-1):
        events = ResponseEvents("resp_r", notes, model, SamplingParams(), 3, after)
        data = events.begin()
        for start in range(0, len(tokens), size):
            data += events.add(tokens[start : start + size], 0)
        return named_events(data + events.add((), finish)), events.response()

    first, response = stream(1)
    assert [item["type"] for item in response["output"]] == kinds
    assert response["status"] == status
    assert first[-1]["response"] == response
    assert [event["sequence_number"] for event in first] == list(range(len(first)))
    assert [event["item"] for event in first if event["type"].endswith("item.done")] == response["output"]
    for size in (2, 7, 1000):
        assert stream(size) == (first, response)
        assert stream(size, after=5) == (first[6:], response)
        assert stream(size, after=NO_EVENTS) == ([], response)


def test_notes_are_bounded_once_inflated_and_those_of_newer_routers_are_read():
    notes = ResponseNotes(created_at=1, model="m", shown={}, input=[{"type": "reasoning", "text": "a" * MAX_BYTES}])
    with pytest.raises(InvalidArgument):
        notes.to_bytes()
    assert ResponseNotes.from_bytes(zlib.compress(b'{"kind": "response/1", "a": "%s"}' % (b"a" * MAX_BYTES))) is None
    small = ResponseNotes(created_at=1, model="m", shown={})
    newer = {**json.loads(zlib.decompress(small.to_bytes())), "mood": 1}
    assert ResponseNotes.from_bytes(zlib.compress(json.dumps(newer).encode())) == small


def test_many_texts_of_one_speaker_are_joined_once():
    chat = inference_pb2.Chat()
    writer = ChatWriter(chat)
    for text in ("", "a", "b", ""):
        writer.add_text("user", text)
    assert chat.messages[0].content == ""  # nothing is copied while more may come
    writer.add_result("c", ["so"])
    writer.add_text("user", "x")
    writer.add_text("user", "y")
    writer.finish()
    assert [message.content for message in chat.messages] == ["a\nb\n", "so", "x\ny"]


async def test_thoughts_are_not_kept_as_context_and_a_cancel_shows_the_response_once(
    world, call, templates, monkeypatch
):
    await world.start(routers=2)
    thought = {"type": "reasoning", "content": [{"text": "hm"}]}
    first = (await call("POST", PATH, {**ASKED, "input": [thought, {"role": "user", "content": "Hi"}]})).object
    second = (await call("POST", PATH, {**ASKED, "previous_response_id": first["id"]})).object
    kept = ResponseNotes.from_bytes(world.entry(second["id"]).notes)
    assert [item["type"] for item in kept.context] == ["message", "message"]
    shown, find = [], StoredResponses.find

    async def counted(self, response_id):
        shown.append(response_id)
        return await find(self, response_id)

    monkeypatch.setattr(StoredResponses, "find", counted)
    long = (await call("POST", PATH, {**ASKED, "max_output_tokens": 5000, "background": True})).object["id"]
    assert (await call("POST", f"{PATH}/{long}/cancel", router=1)).object["status"] == "cancelled"
    assert world.entry(long).record.state is SequenceState.CANCELLED
    assert shown == [long]
