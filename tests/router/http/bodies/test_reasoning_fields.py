"""Reasoning of chats over HTTP: what bodies say of it, and where answers have it."""

import pytest

from octavo.request.sampling import Shape
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.wire.public import sampling_from_bytes

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
THINKS = "{{ messages }}{% if enable_thinking is false %}<think></think>{% endif %}</think>"
SAID = "<think>\nHm, </thi\n</think>\n\nYes <b>"


@pytest.fixture
def templates(templates, monkeypatch):
    """The template is that of a model that reasons."""
    monkeypatch.setattr(ByteTokenizer, "chat_template", THINKS, raising=False)
    return templates


def body(text, **more):
    """A body whose answer is a text."""
    return {"messages": HI, "max_tokens": 200, "structured_outputs": {"choice": [text]}, **more}


def joined(deltas, name):
    return "".join(delta.get(name) or "" for delta in deltas)


@pytest.mark.parametrize("inside", [False, True])
async def test_reasoning_is_apart_from_content_in_messages_deltas_and_usage(templates, inside, call, post):
    said = SAID.removeprefix("<think>") if inside else SAID
    asked = body(said, chat_template_kwargs={"ends_with": "<think>\n"} if inside else {})
    whole = (await post(PATH, asked)).object
    (choice,) = whole["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Yes <b>", *["Hm, </thi"] * 2)
    counted = len(said) - len("\n\nYes <b>")  # a token is a byte
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}
    chunks = (await post(PATH, {**asked, "stream": True, "stream_options": {"include_usage": True}})).chunks
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert joined(deltas, "content") == "Yes <b>"
    assert joined(deltas, "reasoning_content") == joined(deltas, "reasoning") == "Hm, </thi"
    assert chunks[-1]["usage"] == whole["usage"]
    again = (await call("GET", f"/v1/requests/{whole['id']}")).object  # the request has ended, and its prompt is gone
    assert (again["choices"][0]["message"], again["usage"]) == (message, whole["usage"])
    plain = (await call("GET", f"/v1/requests/{whole['id']}?chat=false")).object
    assert plain["choices"][0]["text"] == said
    for _ in range(2):
        named = (await post(PATH, {**asked, "request_id": "chatcmpl-named"})).object
        assert named["choices"][0]["message"] == message
    hidden = (await post(PATH, {**asked, "include_reasoning": False})).object
    message = hidden["choices"][0]["message"]
    assert message["content"] == "Yes <b>" and not {"reasoning", "reasoning_content"} & set(message)
    assert hidden["usage"] == whole["usage"]


@pytest.mark.parametrize(("inside", "shape"), [(True, Shape.LARK), (False, Shape.JSON_OBJECT)])
async def test_json_waits_for_the_end_of_reasoning_that_the_prompt_has_begun(world, templates, inside, shape, post):
    more = {"chat_template_kwargs": {"ends_with": "<think>\n"}} if inside else {}
    asked = {"messages": HI, "max_tokens": 9, "response_format": {"type": "json_object"}, **more}
    name = (await post(PATH, asked)).object["id"]
    assert sampling_from_bytes(world.entry(name).record.sampling).constraint.shape is shape


async def test_an_output_without_reasoning_is_shown_as_it_is(templates, monkeypatch, post):
    whole = (await post(PATH, body("<thin"))).object
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "<thin", "refusal": None}
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    monkeypatch.setattr(ByteTokenizer, "chat_template", "{{ messages }}")  # of a model that does not reason
    whole = (await post(PATH, body(SAID, model="fake"))).object
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": SAID, "refusal": None}
    assert "completion_tokens_details" not in whole["usage"]


async def test_what_bodies_say_of_reasoning_gets_to_the_template(templates, post):
    earlier = {"role": "assistant", "content": "No.", "reasoning_content": "Hm.", "reasoning": "Hm."}
    asked = body("x", messages=[*HI, earlier, *HI], reasoning_effort="low", chat_template_kwargs={"thinking": 3})
    assert (await post(PATH, asked)).status == 200
    *_, details, variables = templates[-1]
    assert details[1] == {"reasoning_content": "Hm."}
    assert variables == {"enable_thinking": True, "thinking": 3, "reasoning_effort": "low"}
    await post(PATH, body("x", reasoning_effort="none"))
    assert templates[-1].variables == {"enable_thinking": False, "thinking": False}


async def test_the_validator_s_names_are_those_of_bodies(templates, post):
    called = {"function": {"name": "a b", "arguments": "[1]"}}
    turn = {"role": "assistant", "tool_calls": [called]}
    for more, param in (
        ({"messages": [*HI, turn]}, "messages[1].tool_calls[0].function.name"),
        ({"messages": [*HI, turn | {"tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}]},
         "messages[1].tool_calls[0].function.arguments"),
        ({"tools": [{"function": {"name": "<a>"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a", "parameters": [1]}}]}, "tools[0].function.parameters"),
    ):  # fmt: skip
        answer = await post(PATH, body("x") | more)
        assert (answer.status, answer.error["param"]) == (400, param)
