"""Values of each sampling parameter, made of its row: at the edges, just beyond, of a wrong type."""

import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from octavo.request import limits
from octavo.request.limits import NumberRange
from octavo.request.sampling import PARAMETERS, Constraint, Parameter, Shape

NAN, INF = math.nan, math.inf
VOCAB = 100
U32 = st.integers(0, limits.U32_MAX)


def inside(row: Parameter) -> list[Any]:
    """Values that the row allows, other than the default, with its edges."""
    if row.is_flag:
        return [not row.default]
    if row.is_constraint:
        return [Constraint.choice(["ja", "nein"]), Constraint(Shape.JSON_OBJECT), Constraint(Shape.REGEX, "a" * 16_384)]
    if row.allowed is None:
        return {
            "stop": [("é" * 128,) * 16, ("a", "b")],
            "logit_bias": [{0: -100.0, VOCAB - 1: 100}, {5: 0.5}],
            "banned_sequences": [((1,) * 15 + (VOCAB - 1,), (3,)), ((5, 6),) * 1024],
        }.get(row.name, [(0, VOCAB - 1), (3,) * (row.most or 0)])
    low = math.nextafter(row.allowed.low, INF) if row.allowed.above else row.allowed.low
    return [value for value in (low, row.allowed.high) if value != row.default]


def beyond(row: Parameter) -> list[Any]:
    """Values that the row does not allow."""
    if row.is_flag:
        return [None, 1, 0, "true"]
    if row.is_constraint:
        return [
            1,
            "a+",
            {},
            Constraint(Shape.REGEX, ""),
            Constraint(Shape.REGEX, "a" * 16_385),
            Constraint.choice([""]),
        ]
    if row.allowed is not None:
        step = 1 if row.allowed.integer else 0.1
        low = row.allowed.low - (0 if row.allowed.above else step)
        types = ["1", True, [], b"", 10**400, NAN, INF, -INF, *([1.0] if row.allowed.integer else [])]
        return [low, row.allowed.high + step, *types, *([] if row.allowed.optional else [None])]
    if row.name == "logit_bias":
        wrong = [{VOCAB: 1.0}, {-1: 1.0}, {1: NAN}, {1: INF}, {1: 100.1}, {"1": 1.0}, {1: "1"}, {1: True}]
        return [*wrong, None, [], [(1, 1.0)], dict.fromkeys(range(301), 0.0)]
    entries: list[Any] = {
        "stop": ["", "x" * 257, "é" * 129, "\ud800", b"x", None],
        "banned_sequences": [(), (1,) * 17, (1, VOCAB), (1, -1), 1, "ab", None, (None,)],
    }.get(row.name, [VOCAB, -1, 1.0, "1", 2**70])
    one: tuple[Any, ...] = ("x",) if row.name == "stop" else ((1,),) if row.name == "banned_sequences" else (1,)
    return [*((entry,) for entry in entries), one * ((row.most or 0) + 1), "ab", "", 3, 0, None]


def all_beyond() -> Iterator[tuple[str, Any]]:
    for row in PARAMETERS.values():
        yield from ((row.name, value) for value in beyond(row))


def strategy(row: Parameter) -> st.SearchStrategy[Any]:
    """Values of the row that the wire can carry."""
    if row.is_flag:
        return st.booleans()
    if row.is_constraint:
        texts = st.text(min_size=1, max_size=9)
        plain = st.builds(Constraint, st.sampled_from([Shape.JSON_SCHEMA, Shape.REGEX, Shape.LARK]), texts, texts)
        return st.none() | plain | st.lists(texts, max_size=3).map(Constraint.choice) | st.just(inside(row)[1])
    if row.allowed is not None:
        return numbers(row.allowed)
    return {
        "stop": st.lists(st.text(min_size=1, max_size=9), max_size=4).map(tuple),
        "logit_bias": st.dictionaries(U32, st.floats(-100, 100, width=32), max_size=5),
        "banned_sequences": st.lists(st.lists(U32, max_size=3).map(tuple), max_size=3).map(tuple),
    }.get(row.name, st.lists(U32, max_size=5).map(tuple))


def numbers(allowed: NumberRange) -> st.SearchStrategy[Any]:
    values: st.SearchStrategy[Any] = st.floats(allowed.low, allowed.high, width=32, exclude_min=allowed.above)
    if allowed.integer:
        values = st.integers(int(allowed.low), int(allowed.high))
    return st.none() | values if allowed.optional else values
