"""Valid bodies, mutated: whatever comes of one, no answer is an error of the server, and none is missing."""

import asyncio
import json
import random

import pytest
from effort import draws, patience

from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer

SEED = 20
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}, {"role": "user", "content": "So"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"$ref": "#/$defs/b"}},
    "required": ["a"],
    "$defs": {"b": {"enum": ["x", "yy"]}},
}
FORM = {"type": "json_schema", "json_schema": {"name": "f", "strict": True, "schema": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}
COMMON = {
    "model": "fake", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "n": 2, "seed": 3,
    "stop": ["x", "yy"], "logit_bias": {"7": 1.5}, "presence_penalty": 0.5, "priority": -1, "user": "u",
    "prompt_logprobs": 1, "truncate_prompt_tokens": 5, "add_special_tokens": True, "bad_words": ["ab"],
    "stop_token_ids": [9], "min_tokens": 1, "stream": False, "return_token_ids": True, "repetition_penalty": 1.1,
}  # fmt: skip
MESSAGE = {
    "max_tokens": 2, "system": [{"type": "text", "text": "Be"}], "stop_sequences": ["x"], "top_k": 3, "stream": True,
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "so"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 3}, "metadata": {"user_id": "u"},
}  # fmt: skip
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]}
RESPONSE = {
    "max_output_tokens": 2, "instructions": "Be", "metadata": {"a": "b"}, "store": True, "stream": False,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "so"},
        THOUGHT,
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": "auto",
    "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "truncation": "disabled",
}  # fmt: skip
BODIES = [
    ("/v1/completions", {**COMMON, "prompt": ["One", [1, 2]], "logprobs": 1, "best_of": 2, "echo": False}),
    ("/v1/completions", {"prompt": "One", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**COMMON, "messages": HI, "tools": [TOOL], "tool_choice": "auto", "logprobs": True}),
    ("/v1/chat/completions", {"messages": HI[:2], "continue_final_message": True, "echo": True, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}}),
    ("/tokenize", {"messages": HI, "return_token_strs": True}),
    ("/tokenize", {"prompt": "One", "add_special_tokens": False}),
    ("/v1/messages", MESSAGE),
    ("/v1/responses", RESPONSE),
    ("/detokenize", {"tokens": [65, 66], "model": "fake"}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2, "response_format": FORM, "tools": [TOOL]}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2, "tools": [STRICT], "tool_choice": "required"}),
    ("/v1/embeddings", {"input": ["One", "Two"], "dimensions": 3, "encoding_format": "base64", "normalize": True}),
    ("/rerank", {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"], "method": "cosine", "encoding_format": "float"}),
]
LIMITS = {"/v1/responses": "max_output_tokens"}
ENDLESS = ("/tokenize", "/detokenize", "/v1/embeddings", "/rerank", "/score")  # nothing is generated
DEEP = json.loads("[" * 200 + "]" * 200)
VALUES = [
    None, True, False, -1, 0, 1, 2, 17, 65, 2**31, 2**33, 2**70, -(2**70), 0.5, -0.0, 1e308, "", "x", "auto", "\x00",
    "\udcff", "\U0001f600" * 40, "x" * 9000, [], [1], ["x"], [[1, 2]], [None], ["x"] * 70, [1] * 5000, {}, {"7": 1},
    {"type": "text"}, {"a": {"b": [1, {"c": None}]}}, DEEP, {"role": "user"}, [{"role": "user", "content": "x"}],
]  # fmt: skip


def places(value, path=()):
    """The paths of all that is inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*path, name)
        yield from places(each, (*path, name))


def mutate(body, chance):
    """One change: a value that is another, is missing, is renamed, is there twice, or belongs to another field."""
    *before, name = chance.choice([*places(body)])
    holder = body
    for each in before:
        holder = holder[each]
    match chance.randrange(6):
        case 0:
            del holder[name]
        case 1 if isinstance(holder, dict):
            holder[chance.choice(["", "x", "content", "name", str(name) * 30, "\u00e9"])] = holder.pop(name)
        case 2:
            other = body
            for each in chance.choice([*places(body)]):
                other = other[each]
            holder[name] = json.loads(json.dumps(other))
        case 3 if isinstance(holder, list):
            holder += [json.loads(json.dumps(holder[name]))] * chance.choice([1, 3, 70])
        case _:
            holder[name] = json.loads(json.dumps(chance.choice(VALUES)))


@pytest.mark.scaled
@pytest.mark.timeout(900)
async def test_no_mutated_body_is_an_error_of_the_server(world, connect, monkeypatch):
    def apply_chat(self, messages, *_, **more):
        return [*"".join(content for _, content in messages).encode()[:300]] or [1]

    monkeypatch.setattr(ByteTokenizer, "apply_chat", apply_chat)
    await world.start()
    chance, connection, statuses = random.Random(SEED), await connect(), set()
    for number in range(draws(400, 10_000)):
        path, valid = chance.choice(BODIES)
        body = json.loads(json.dumps(valid))
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            if body:
                mutate(body, chance)
        if body.get(limit := LIMITS.get(path, "max_tokens")) not in (0, 1, 2):
            body[limit] = 2 if path not in ENDLESS else None
        connection.send("POST", path, json.dumps(body).encode())
        async with asyncio.timeout(patience(60)):
            answer = await connection.answer()
        statuses.add((path, answer.status))
        assert answer.status in (200, 400, 404, 409), (SEED, number, path, body, answer.body)
        if not answer.headers["content-type"].startswith("text/event-stream"):
            assert json.loads(answer.body)
        if answer.headers.get("connection") == "close":
            connection = await connect()
    assert statuses >= {(path, status) for path, _ in BODIES for status in (200, 400)}
    await world.until_nothing_left()
