"""How much a test tries, and how long it waits: `make test` tries little of everything, `make test-long` the rest.

`make test-long` is `pytest --long`. It runs the tests marked `long`, which `make test` leaves out, and again those
marked `scaled`, and all properties, with more draws. `pytest --night` also runs those marked `night`, with as many
draws as one night allows. The variable tells processes that a test starts.

| means | in `make test` | in `make test-long` |
|---|---|---|
| `draws(usual, long)`, with the marker `scaled` | the usual number of cases | the long one |
| `diagonal(rows, columns)` | of all pairs, each row and each column once | the other pairs |
| `some(cases, usual)` | the usual cases | the others |
| Hypothesis (`tests/conftest.py`) | 30 examples, or as many as a test says | 300, or as many as a test says |
"""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

VARIABLE = "OCTAVO_TEST_LONG"


LONG, NIGHT = "1", "night"


def is_long() -> bool:
    return VARIABLE in os.environ


def is_night() -> bool:
    return os.environ.get(VARIABLE) == NIGHT


def diagonal(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Parameters: all pairs. `make test` takes each row and each column at least once, `make test-long` the others."""
    step = min(len(rows), len(columns))
    return [
        pytest.param(row, column, marks=[pytest.mark.long] if (i - j) % step else [])
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def some(cases: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """Parameters: all cases, which are tuples where there are several. `make test` takes the usual ones alone."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in usual else [pytest.mark.long])
        for case in cases
    ]


def draws(usual: int, long: int) -> int:
    """How many cases a test marked `scaled` tries: `long` of them with --long or --night."""
    return long if is_long() else usual


def patience(seconds: float) -> float:
    """How long to wait for what takes so many seconds at most: longer where the machine has more to do than cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
