"""How much a test tries, and how long it waits: `make test` tries little of everything, `make test-long` the rest.

`make test-long` is `pytest --long`. It runs the tests marked `long`, which `make test` leaves out, and those marked
`scaled`, which `make test` runs with fewer draws. The variable tells processes that a test starts.
"""

import os

VARIABLE = "OCTAVO_TEST_LONG"


def is_long() -> bool:
    return os.environ.get(VARIABLE) == "1"


def draws(usual: int, long: int) -> int:
    """How many cases a test marked `scaled` tries."""
    return long if is_long() else usual


def patience(seconds: float) -> float:
    """How long to wait for what takes so many seconds at most: longer where the machine has more to do than cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
