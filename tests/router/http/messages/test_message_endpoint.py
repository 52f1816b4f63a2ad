"""POST /v1/messages: whole, in events, counted, and refused in Anthropic's shape."""

import json
from types import SimpleNamespace

import pytest

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.text.stop import TextStream
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.v1 import types_pb2
from octavo.wire.public import sampling_from_bytes
from router.http.messages.message_body import read_message
from router.http.messages.message_format import MessageFormat, input_of
from router.tools.output_forms import OutputForms

PATH = "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "weather", "description": "tells", "input_schema": {"type": "object"}}
ASKED = {"max_tokens": 12, "messages": HI, "temperature": 0}


def events_of(body):
    """The events of a stream, each with the name that stands before it."""
    found = []
    for event in filter(None, body.decode().split("\n\n")):
        name, data = event.split("\n", 1)
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(events):
    return "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")


async def test_a_message_is_answered_whole_and_in_events(world, call, templates):
    await world.start()
    whole = (await call("POST", PATH, ASKED)).object
    assert whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    (block,) = whole["content"]
    usage = whole["usage"]
    assert usage["output_tokens"] == 12
    counted = (await call("POST", f"{PATH}/count_tokens", {"messages": HI})).object
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    answer = await call("POST", PATH, {**ASKED, "stream": True})
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    found = events_of(answer.body)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert text_of(found) == block["text"]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"
    assert found[-2]["usage"]["output_tokens"] == 12


async def test_a_budget_holds_a_model_that_has_marks_of_thinking(world, call, templates, monkeypatch):
    await world.start()
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 3}}

    async def asked(**more):
        """The budget and its marks, as the record has them."""
        name = (await call("POST", PATH, ASKED | thinking | more)).object["id"]
        params = sampling_from_bytes(world.entry(name).record.sampling)
        return params.thinking_budget, params.thinking_start_ids, params.thinking_end_ids

    assert await asked() == (None, (), ())
    marks = {"<think>": 7, "</think>": 8}
    monkeypatch.setattr(ByteTokenizer, "token_id", lambda self, text: marks.get(text))
    assert await asked() == (3, (7,), (8,))
    assert await asked(thinking_budget=5) == (5, (7,), (8,))
    assert (await asked(output_config={"format": {"type": "json_schema", "schema": {"enum": [7]}}}))[0] is None
    wrong = await call("POST", PATH, ASKED | {"thinking": {"type": "enabled", "budget_tokens": "many"}})
    assert wrong.status == 400


async def test_the_stop_sequence_that_ended_the_text_is_named(world, call, templates):
    await world.start()
    asked = {**ASKED, "max_tokens": 400}
    text = (await call("POST", PATH, asked)).object["content"][0]["text"]
    stop = next(char for char in text[10:] if char.isascii())
    cut = (await call("POST", PATH, {**asked, "stop_sequences": ["never", stop]})).object
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert cut["content"][0]["text"] == text[: text.index(stop)]


async def test_errors_have_the_shape_of_anthropics_api(world, call, templates):
    await world.start()
    for body, status, kind in [
        ({"messages": HI}, 400, "invalid_request_error"),
        ({**ASKED, "model": "claude-9"}, 404, "not_found_error"),
        (b"{", 400, "invalid_request_error"),
    ]:
        answer = await call("POST", PATH, body)
        assert answer.status == status
        assert answer.object["type"] == "error"
        assert answer.object["error"]["type"] == kind
        assert answer.headers["request-id"] == answer.object["request_id"]


def test_turns_calls_and_results_become_a_chat():
    asked = read_message(
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "Be", "cache_control": {}}, {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "user", "content": [{"type": "text", "text": "there"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I look"},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"where": "Oslo"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "text", "text": "and?"},
                ]},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "stop_sequences": ["x"], "top_k": 3, "metadata": {"user_id": "u"},
            "thinking": {"type": "enabled", "budget_tokens": 9},
        }
    )  # fmt: skip
    request, tools = asked.answer.request, asked.answer.tools
    turns = [(turn.role, turn.content, turn.tool_call_id, len(turn.tool_calls)) for turn in request.chat.messages]
    assert turns == [
        ("system", "Be\nbrief", "", 0),
        ("user", "Hi\nthere", "", 0),
        ("assistant", "I look", "", 1),
        ("tool", "rain", "t1", 0),
        ("user", "and?", "", 0),
    ]
    assert request.chat.messages[2].tool_calls[0].arguments_json == '{"where": "Oslo"}'
    assert [tool.name for tool in request.chat.tools] == ["weather"]
    assert (tools.forced, tools.is_parallel) == (("weather",), False)
    assert (list(request.sampling.stop), request.sampling.top_k, request.sampling.max_tokens) == (["x"], 3, 5)
    assert asked.shows_thinking


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}, "structured_outputs": {"regex": "a"}},
         "output_config.format.type"),
        ({"mood": 1}, "mood"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused(more, param):
    with pytest.raises(InvalidArgument) as caught:
        read_message({"messages": HI, "max_tokens": 3, **more})
    assert caught.value.field == param


CALL = '<tool_call>\n{"name": "weather", "arguments": {"where": "Oslo"}}\n</tool_call>'


def shown(text, finish, pieces, formats=()):
    """What a client makes of the events of a text that comes in such pieces, and the whole message."""
    asked = read_message({"messages": HI, "max_tokens": 9, "tools": [TOOL], "request_id": "r"})
    tokenizer = ByteTokenizer()
    asked.answer.division = OutputForms(*formats).division(tokenizer, asked.answer.tools)
    model = SimpleNamespace(
        name="m",
        tokenizer=tokenizer,
        text_stream=lambda params: TextStream.of_branch(tokenizer.detokenizer(), params, ()),
    )
    form = MessageFormat(asked, SimpleNamespace(prompt_len=3, model=model, params=SamplingParams()))
    tokens, data = tokenizer.encode(text), form.begin()
    for start in range(0, len(tokens), pieces):
        data += form.add(tokens[start : start + pieces], 0)
    data += form.add((), finish)
    usage = types_pb2.Usage(prompt_tokens=3, cached_tokens=2, output_tokens=len(tokens))
    return events_of(data + form.end(usage)), form.whole(usage)


@pytest.mark.parametrize(
    ("text", "finish", "kinds", "reason"),
    [
        (f"I look. {CALL}", FinishReason.STOP, ["text", "tool_use"], "tool_use"),
        (f"{CALL}\n{CALL}", FinishReason.STOP, ["tool_use", "tool_use"], "tool_use"),
        (f"{CALL} done", FinishReason.STOP, ["tool_use", "text"], "tool_use"),
        (CALL[:-20], FinishReason.LENGTH, ["tool_use"], "max_tokens"),
        ("plain", FinishReason.STOP, ["text"], "end_turn"),
        ("", FinishReason.STOP, [], "end_turn"),
    ],
)
def test_blocks_do_not_depend_on_how_the_tokens_came(text, finish, kinds, reason):
    first, whole = shown(text, finish, 1)
    assert [block["type"] for block in whole["content"]] == kinds
    assert whole["stop_reason"] == reason
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 3
    for pieces in (2, 7, 1000):
        assert shown(text, finish, pieces) == (first, whole)
    pieces_of = {}
    blocks = [dict(e["content_block"]) for e in first if e["type"] == "content_block_start"]
    for event in (e for e in first if e["type"] == "content_block_delta"):
        delta, block = event["delta"], blocks[event["index"]]
        if delta["type"] == "text_delta":
            block["text"] += delta["text"]
        else:
            pieces_of[event["index"]] = pieces_of.get(event["index"], "") + delta["partial_json"]
    for index, arguments in pieces_of.items():
        blocks[index]["input"] = input_of(arguments)
    assert blocks == whole["content"]


def test_the_channels_of_gpt_oss_are_blocks():
    text = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    text += "<|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Yes"
    _, whole = shown(text, FinishReason.STOP, 7, ("harmony", "harmony"))
    assert [block["type"] for block in whole["content"]] == ["tool_use", "text"]
    assert whole["content"][1]["text"] == "Yes"
