"""Sampling parameters as bytes, field by field, by the types that `SamplingParams` gives its fields.

Numbers come first, in the order of the fields; then the lists and mappings, each as how many numbers it has and these.
Fields of texts (stop strings) are left out. A field that is added to `SamplingParams` needs no line here.
"""

import struct
from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from types import MappingProxyType
from typing import Any, get_type_hints

from octavo.request.sampling import SamplingParams

_TYPES = get_type_hints(SamplingParams)
_NUMBERS = {float: "d", int: "q", bool: "q", int | None: "qq", float | None: "qd"}  # q: is it there?
_CODES = {f.name: _NUMBERS[_TYPES[f.name]] for f in fields(SamplingParams) if _TYPES[f.name] in _NUMBERS}
_SCALARS = struct.Struct("=" + "".join(_CODES.values()))
_MAPPINGS, _LISTS, _NESTED = (
    [name for name, kind in _TYPES.items() if kind == wanted]
    for wanted in (Mapping[int, float], tuple[int, ...], tuple[tuple[int, ...], ...])
)
_COUNT = struct.Struct("=q")


def params_to_bytes(params: SamplingParams) -> bytes:
    """The parameters without their texts."""
    numbers: list[float] = []
    for name, code in _CODES.items():
        value = getattr(params, name)
        if len(code) == 2:
            numbers.append(value is not None)
            value = value or 0
        numbers.append(value if code.endswith("d") else _signed(value))
    parts = [_SCALARS.pack(*numbers)]
    for name in _MAPPINGS:
        pairs = getattr(params, name)
        parts.append(struct.pack(f"=q{'qd' * len(pairs)}", len(pairs), *chain.from_iterable(pairs.items())))
    for name in _LISTS:
        parts.append(_list(getattr(params, name)))
    for name in _NESTED:
        lists = getattr(params, name)
        parts += [_COUNT.pack(len(lists)), *map(_list, lists)]
    return b"".join(parts)


def params_from_bytes(data: bytes) -> SamplingParams:
    """The parameters that `params_to_bytes` was given, without their texts."""
    place = 0

    def take_numbers(form: str) -> tuple[Any, ...]:
        nonlocal place
        numbers = struct.unpack_from(f"={form}", data, place)
        place += struct.calcsize(f"={form}")
        return numbers

    def take_list() -> tuple[int, ...]:
        return take_numbers(f"{take_numbers('q')[0]}q")

    numbers = iter(take_numbers("".join(_CODES.values())))
    values: dict[str, Any] = {}
    for name, code in _CODES.items():
        there = next(numbers) if len(code) == 2 else True
        value = next(numbers)
        values[name] = bool(value) if _TYPES[name] is bool else value if there else None
    if values["seed"] is not None:
        values["seed"] %= 2**64
    for name in _MAPPINGS:
        pairs = iter(take_numbers("qd" * take_numbers("q")[0]))
        values[name] = MappingProxyType(dict(zip(pairs, pairs, strict=True)))
    for name in _LISTS:
        values[name] = take_list()
    for name in _NESTED:
        values[name] = tuple(take_list() for _ in range(take_numbers("q")[0]))
    return SamplingParams(**values)


def _list(numbers: tuple[int, ...]) -> bytes:
    return struct.pack(f"={len(numbers) + 1}q", len(numbers), *numbers)


def _signed(number: int) -> int:
    """A seed has 64 bits and no sign."""
    return number - 2**64 if number >= 2**63 else number
