"""How much a test tries, and how long it waits: `make test` tries little of everything, `make test-long` the rest.

`make test-long` is `pytest --long`. It runs the tests marked `long`, which `make test` leaves out, and those marked
`scaled`, which `make test` runs with fewer draws. `pytest --night` also runs those marked `night`, with as many draws
as one night allows. The variable tells processes that a test starts.
"""

import os

VARIABLE = "OCTAVO_TEST_LONG"


LONG, NIGHT = "1", "night"


def is_night() -> bool:
    return os.environ.get(VARIABLE) == NIGHT


def draws(usual: int, long: int) -> int:
    """How many cases a test marked `scaled` tries: `long` of them with --long or --night."""
    return long if os.environ.get(VARIABLE) else usual


def patience(seconds: float) -> float:
    """How long to wait for what takes so many seconds at most: longer where the machine has more to do than cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
