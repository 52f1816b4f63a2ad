"""Anthropic's own package, unchanged, against a router: python client.py http://HOST:PORT. Prints what it got, as JSON.

It first prints a line once its stream has begun.
"""

import json
import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
EVEN = {"extra_body": {"temperature": 0}}  # this version of the package has no argument for it
ASKED = {"model": "fake", "max_tokens": 1200, "messages": [{"role": "user", "content": "Hi"}], **EVEN}

text = ""
with client.messages.stream(**ASKED, system="Be brief") as stream:
    for event in stream:
        if event.type == "content_block_delta" and not text:
            print("begun", flush=True)
        text += event.delta.text if event.type == "content_block_delta" else ""
    final = stream.get_final_message()
whole = client.messages.create(**ASKED, system="Be brief")
counted = client.messages.count_tokens(model="fake", messages=ASKED["messages"], system="Be brief")
tool = {"name": "weather", "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}}}
turns = [
    *ASKED["messages"],
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"where": "Oslo"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
]
answered = client.messages.create(**{**ASKED, "max_tokens": 9, "messages": turns, "tools": [tool]})

errors = []
for wrong in (
    {"extra_body": {"temperature": 11}},
    {"model": "claude-9"},
    {"tools": [{"type": "bash_20250124", "name": "bash"}]},
):
    try:
        client.messages.create(**{**ASKED, **wrong})
    except anthropic.APIStatusError as error:
        errors.append([type(error).__name__, error.status_code, error.body["error"]["type"], bool(error.request_id)])

print(
    json.dumps(
        {
            "text": text,
            "final": final.content[0].text,
            "whole": whole.content[0].text,
            "reasons": [final.stop_reason, whole.stop_reason, answered.stop_reason],
            "usage": [final.usage.output_tokens, whole.usage.output_tokens],
            "prompt": whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
            "counted": counted.input_tokens,
            "errors": errors,
        }
    )
)
