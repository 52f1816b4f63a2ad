"""How much later the first token of an answer comes if it must be JSON of a schema that nobody has seen: end to end.

octavo up --grpc-port 0 --json
tests/bench/first_token.py http://127.0.0.1:PORT --pairs 200

Free streams and streams of new schemas in turns, one at a time. Both ask for the same prompt but for its number. With
`--pids` of router and workers, their CPU time says on a busy machine what a quiet one would wait for at most.
"""

import argparse
import random
import statistics
import time
from typing import Any

import psutil
from _service import describe_machine, post, processor_seconds, quantile

KINDS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 40},
    {"type": "integer", "minimum": 0, "maximum": 1000},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5},
    {"enum": [f"choice {number}" for number in range(30)]},
    {"type": "boolean"},
]


def new_schema(chance: random.Random, properties: int) -> dict[str, Any]:
    """An object of objects, whose names nobody has used before."""

    def thing(left: int) -> dict[str, Any]:
        names = [f"n{chance.randrange(10**9)}" for _ in range(properties)]
        inner = {name: chance.choice(KINDS) for name in names}
        if left:
            inner[f"o{chance.randrange(10**9)}"] = thing(left - 1)
        return {"type": "object", "properties": inner, "required": list(inner)}

    return thing(2)


def first_token_ms(url: str, number: int, schema: dict[str, Any] | None) -> float:
    messages = [{"role": "user", "content": f"Write the record of person {number} as JSON, with all that you know."}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 4, "stream": True, "temperature": 0}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "new", "schema": schema}}
    began, first = time.perf_counter(), 0.0
    with post(url + "/v1/chat/completions", body) as reply:
        for line in reply:
            if not first and b'"content":' in line and b'"content":""' not in line:
                first = 1000 * (time.perf_counter() - began)
    if not first:
        raise RuntimeError("a stream had no token")
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--properties", type=int, default=5, help="of each of the three nested objects")
    parser.add_argument("--pids", type=int, nargs="*", default=[])
    asked = parser.parse_args()
    processes = [psutil.Process(pid) for pid in asked.pids]
    print(describe_machine())
    chance = random.Random(time.time_ns())
    free, bound, spent = list[float](), list[float](), [0.0, 0.0]
    for number in range(-5, asked.pairs):  # the first ones make everything ready
        for place, schema in enumerate((None, new_schema(chance, asked.properties))):
            before = sum(map(processor_seconds, processes))
            took = first_token_ms(asked.url, 2 * number + place, schema)
            if number >= 0:
                (free, bound)[place].append(took)
                spent[place] += sum(map(processor_seconds, processes)) - before
    more = [b - a for a, b in zip(free, bound, strict=True)]
    for name, values in (("free", free), ("unseen schema", bound), ("difference of a pair", more)):
        print(f"{name}, ms: p50 {statistics.median(values):.1f}, p99 {quantile(values, 0.99):.1f}")
    if processes:
        print(f"CPU time of these processes, ms a request: {', '.join(f'{1000 * s / asked.pairs:.1f}' for s in spent)}")
    print(f"p99 of one over p99 of the other: {quantile(bound, 0.99) - quantile(free, 0.99):.1f} ms")


if __name__ == "__main__":
    main()
