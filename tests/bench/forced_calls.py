"""How many calls that must come keep their schemas, at a temperature of 1: tool_choice `required`, by a real server.

octavo up --grpc-port 0 --json
tests/bench/forced_calls.py http://127.0.0.1:PORT --runs 1000
"""

import argparse
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from _service import post

WEATHER = {"city": {"enum": ["Oslo", "Rome", "Rom\u00e9"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
SEARCH = {
    "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    "exact": {"type": "boolean"},
}
TOOLS = {"weather": WEATHER, "search": SEARCH, "stop": {}}
ASKED = ["How is the weather in Oslo?", "Find red shoes.", "That is enough.", "Tell me a story!", "{}", "Who are you?"]


def keeps(name: str, text: str) -> bool:
    """Whether the arguments of a call are what its schema says: a second definition, by hand."""
    found = json.loads(text)
    if set(found) != set(TOOLS[name]):
        return False
    if name == "weather":
        return found["city"] in WEATHER["city"]["enum"] and type(found["days"]) is int and 1 <= found["days"] <= 9
    if name == "search":
        words, good = found["words"], all(type(each) is str and len(each) <= 12 for each in found["words"])
        return type(found["exact"]) is bool and 1 <= len(words) <= 3 and good
    return True


def body(run: int, stream: bool) -> dict[str, Any]:
    closed = {"type": "object", "additionalProperties": False}
    tools = [
        {"name": name, "parameters": {**closed, "properties": fields, "required": list(fields)}}
        for name, fields in TOOLS.items()
    ]
    messages = [{"role": "user", "content": ASKED[run % len(ASKED)]}]
    more = {"max_tokens": 160, "seed": run, "temperature": 1.0, "parallel_tool_calls": False, "stream": stream}
    called = {"tools": [{"type": "function", "function": each} for each in tools], "tool_choice": "required"}
    return {"messages": messages, **called, **more}


def ask(url: str, run: int) -> str:
    """What one run says; every second one is a stream."""
    with post(url + "/v1/chat/completions", body(run, run % 2 == 1)) as reply:
        said = reply.read().decode()
    lines = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: {")]
    calls: list[dict[str, Any]] = []
    for line in lines or [said]:
        (choice,) = json.loads(line)["choices"]
        for call in choice.get("delta", choice.get("message", {})).get("tool_calls", ()):
            if "id" in call:
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        finish = choice["finish_reason"]
    if finish != "tool_calls" or len(calls) != 1:
        return f"{len(calls)} calls, {finish}"
    function = calls[0]["function"]
    try:
        good = keeps(function["name"], function["arguments"])
    except (ValueError, KeyError, TypeError):
        good = False
    return f"valid call of {function['name']}" if good else "invalid"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=4)
    asked = parser.parse_args()
    began = time.perf_counter()
    with ThreadPoolExecutor(asked.at_once) as pool:
        found = Counter(pool.map(lambda run: ask(asked.url, run), range(asked.runs)))
    for what, count in found.most_common():
        print(f"{count:6} {what}")
    valid = sum(count for what, count in found.items() if what.startswith("valid"))
    print(f"{valid} of {asked.runs} validate, in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
