"""Changes a file at random: as bytes, as the numbers in it, and as the JSON that it is."""

import copy
import json
import random
import struct
from typing import Any

EDGES = [0, 1, 2, 7, 31, 32, 127, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1]
FLOATS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 3e38, 1e-38, 0.5, 1e20]
ODD: list[Any] = [
    *(None, True, False, "", "x", [], {}, [[]], [{}], {"a": None}, [None], ["x"], "\ud800", "\x00", "../../etc/passwd"),
    *(0, -1, 1, 2, 3, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf")),
    *("a" * 5000, [0] * 5000, {str(i): i for i in range(2000)}, "(a+)+$", "{{", "{% for i in range(10) %}"),
]


def mutate(content: bytes, rng: random.Random, *, is_json: bool, is_text: bool = False) -> bytes:
    """The content with one to a few changes, each of a kind chosen at random."""
    if is_json and rng.random() < 0.7:
        return mutated_json(content, rng)
    if is_text and rng.random() < 0.7:
        return mutated_text(content.decode(), rng).encode()
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        _change_bytes(data, rng)
    return bytes(data)


def _change_bytes(data: bytearray, rng: random.Random) -> None:
    head = min(len(data), rng.choice([64, 512, 4096, 1 << 30]))  # headers are where numbers mean something
    at = rng.randrange(head) if head else 0
    match rng.randrange(9):
        case 0 if data:
            data[at] ^= 1 << rng.randrange(8)
        case 1 if data:
            data[at] = rng.choice([0, 1, 9, 34, 44, 91, 123, 127, 128, 255])
        case 2:
            del data[at:]
        case 3:
            del data[at : at + rng.choice([1, 4, 8, 64])]
        case 4:
            data[at:at] = data[at : at + rng.choice([1, 8, 64, 4096])]
        case 5:
            data[at:at] = rng.randbytes(rng.choice([1, 4, 8]))
        case 6:
            data[at : at + 8] = struct.pack("<Q", rng.choice(EDGES))
        case 7:
            data[at : at + 4] = struct.pack("<I", rng.choice(EDGES) % 2**32)
        case _:
            data[at : at + 4] = struct.pack("<f", rng.choice(FLOATS))


def mutated_json(content: bytes, rng: random.Random) -> bytes:
    """Other values, missing keys, keys of other places, deep nests and repeated parts; what has no JSON is not JSON."""
    document: Any = json.loads(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        document = _changed(document, rng)
    text = json.dumps(document)
    if rng.random() < 0.05:
        depth = rng.choice([10, 1000, 100_000])
        text = text.replace(":", ":" + "[" * depth + "]" * depth + ', "x":', 1)
    return text.encode("utf-8", "surrogatepass")


def _changed(document: Any, rng: random.Random) -> Any:
    places = list(_places(document))
    if not places:
        return copy.deepcopy(rng.choice(ODD))
    # Few of the places are at the top, and these matter most.
    holder, key = rng.choice(places[: rng.choice([20, 200, len(places)])])
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1:
            other, name = rng.choice(places)
            holder[key] = copy.deepcopy(other[name]) if _has(other, name) else None
        case 2 if isinstance(holder, dict):
            holder[rng.choice([str(key) + "x", "", "type", "content", "x" * 3000])] = copy.deepcopy(holder[key])
        case 3 if isinstance(holder[key], list):
            holder[key] = holder[key] * rng.choice([0, 2, 50])
        case 4 if isinstance(holder[key], (int, float)):
            holder[key] = rng.choice(
                [-holder[key], holder[key] * 1000003, holder[key] + 1, holder[key] // 3, str(holder[key])]
            )
        case 5 if isinstance(holder[key], str):
            holder[key] = mutated_text(holder[key], rng)
        case _:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return document


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else isinstance(key, int) and key < len(holder)


def _places(value: Any) -> Any:
    """(holder, key) of every value, the outer ones first."""
    level = [value]
    while level:
        below = []
        for holder in level:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
            for key in keys:
                yield holder, key
                below.append(holder[key])
        level = below


def mutated_text(text: str, rng: random.Random) -> str:
    """Parts that are cut, doubled, or replaced by words that mean something in a template."""
    at, length = rng.randrange(len(text) + 1), rng.choice([1, 3, 10, 40])
    words = ["{{", "}}", "{%", "%}", "{% for a in messages %}", "{% endfor %}", "messages", "''", "|", "range(10**9)"]
    words += ["{{ 'x' * 10**9 }}", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"]
    words += ["{% macro f(x) %}{{ f(x) ~ f(x) }}{% endmacro %}{{ f(1) }}", "{{ ''.__class__ }}", "{{ 10 ** 10 ** 8 }}"]
    words += ["{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"]
    words += ["{{ '%999999999d' % 1 }}", "{{ 'a'.ljust(10**9) }}", "{{ messages | tojson(indent=10**9) }}", "\x00", "ü"]
    words += [
        "{{ 'a' | center(10**9) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ ('a' * 9999).replace('', 'b' * 99999) }}",
    ]
    match rng.randrange(4):
        case 0:
            return text[:at] + text[at + length :]
        case 1:
            return text[:at] + text[at : at + length] + text[at:]
        case _:
            return text[:at] + rng.choice(words) + text[at + rng.choice([0, 0, length]) :]
