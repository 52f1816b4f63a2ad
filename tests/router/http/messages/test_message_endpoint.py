"""POST /v1/messages: whole, in events, counted, and refused in Anthropic's shape."""

from types import SimpleNamespace

import pytest
from response_events import named_events

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


async def test_a_message_is_answered_whole_and_in_events(templates, post):
    whole = (await post(PATH, ASKED)).object
    assert whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    (block,) = whole["content"]
    usage = whole["usage"]
    assert usage["output_tokens"] == 12
    counted = (await post(f"{PATH}/count_tokens", {"messages": HI})).object
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    answer = await post(PATH, {**ASKED, "stream": True})
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    first, begun, *deltas, end, told, last = named_events(answer.body)
    assert [each["type"] for each in (first, begun)] == ["message_start", "content_block_start"]
    assert [each["type"] for each in (end, told, last)] == ["content_block_stop", "message_delta", "message_stop"]
    assert {each["type"] for each in deltas} == {"content_block_delta"}
    assert "".join(each["delta"]["text"] for each in deltas) == block["text"]
    assert (told["delta"]["stop_reason"], told["usage"]["output_tokens"]) == ("max_tokens", 12)
    text = (await post(PATH, {**ASKED, "max_tokens": 400})).object["content"][0]["text"]
    stop = next(char for char in text[10:] if char.isascii())
    cut = (await post(PATH, {**ASKED, "max_tokens": 400, "stop_sequences": ["never", stop]})).object
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert cut["content"][0]["text"] == text[: text.index(stop)]


async def test_a_budget_holds_a_model_that_has_marks_of_thinking(world, templates, monkeypatch, post):
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 3}}

    async def asked(**more):
        """The budget and its marks, as the record has them."""
        name = (await post(PATH, ASKED | thinking | more)).object["id"]
        params = sampling_from_bytes(world.entry(name).record.sampling)
        return params.thinking_budget, params.thinking_start_ids, params.thinking_end_ids

    assert await asked() == (None, (), ())
    marks = {"<think>": 7, "</think>": 8}
    monkeypatch.setattr(ByteTokenizer, "token_id", lambda self, text: marks.get(text))
    assert await asked() == (3, (7,), (8,))
    assert await asked(thinking_budget=5) == (5, (7,), (8,))
    assert (await asked(output_config={"format": {"type": "json_schema", "schema": {"enum": [7]}}}))[0] is None
    wrong = await post(PATH, ASKED | {"thinking": {"type": "enabled", "budget_tokens": "many"}})
    assert wrong.status == 400


async def test_errors_have_the_shape_of_anthropics_api(templates, post):
    for body, status, kind in [
        ({"messages": HI}, 400, "invalid_request_error"),
        ({**ASKED, "model": "claude-9"}, 404, "not_found_error"),
        (b"{", 400, "invalid_request_error"),
    ]:
        answer = await post(PATH, body)
        assert answer.status == status
        assert answer.object["type"] == "error"
        assert answer.object["error"]["type"] == kind
        assert answer.headers["request-id"] == answer.object["request_id"]


def test_turns_calls_and_results_become_a_chat():
    used = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"where": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    asked = read_message(
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "Be", "cache_control": {}}, {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "user", "content": [{"type": "text", "text": "there"}]},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "I look"}, used]},
                {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "stop_sequences": ["x"],
            "top_k": 3,
            "metadata": {"user_id": "u"},
            "thinking": {"type": "enabled", "budget_tokens": 9},
        }
    )
    request, tools = asked.answer.request, asked.answer.tools
    turns = [(turn.role, turn.content, turn.tool_call_id, len(turn.tool_calls)) for turn in request.chat.messages]
    system, user = ("system", "Be\nbrief", "", 0), ("user", "Hi\nthere", "", 0)
    assert turns == [system, user, ("assistant", "I look", "", 1), ("tool", "rain", "t1", 0), ("user", "and?", "", 0)]
    assert request.chat.messages[2].tool_calls[0].arguments_json == '{"where": "Oslo"}'
    assert [tool.name for tool in request.chat.tools] == ["weather"]
    assert (tools.forced, tools.is_parallel) == (("weather",), False)
    assert (list(request.sampling.stop), request.sampling.top_k, request.sampling.max_tokens) == (["x"], 3, 5)
    assert asked.shows_thinking


CALL = '<tool_call>\n{"name": "weather", "arguments": {"where": "Oslo"}}\n</tool_call>'


CHANNELS = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
CHANNELS += "<|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Yes"


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
    return named_events(data + form.end(usage)), form.whole(usage)


@pytest.mark.parametrize(
    ("text", "finish", "kinds", "reason"),
    [
        (CHANNELS, FinishReason.STOP, ["tool_use", "text"], "tool_use"),
        (f"I look. {CALL}", FinishReason.STOP, ["text", "tool_use"], "tool_use"),
        (f"{CALL}\n{CALL}", FinishReason.STOP, ["tool_use", "tool_use"], "tool_use"),
        (f"{CALL} done", FinishReason.STOP, ["tool_use", "text"], "tool_use"),
        (CALL[:-20], FinishReason.LENGTH, ["tool_use"], "max_tokens"),
        ("plain", FinishReason.STOP, ["text"], "end_turn"),
        ("", FinishReason.STOP, [], "end_turn"),
    ],
)
def test_blocks_do_not_depend_on_how_the_tokens_came(text, finish, kinds, reason):
    formats = ("harmony", "harmony") if text == CHANNELS else ()
    first, whole = shown(text, finish, 1, formats)
    assert [block["type"] for block in whole["content"]] == kinds
    assert whole["stop_reason"] == reason
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 3
    for pieces in (2, 7, 1000):
        assert shown(text, finish, pieces, formats) == (first, whole)
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
