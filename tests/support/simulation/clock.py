"""What takes the place of clocks, of chance and of the end of a process while a simulation runs.

A simulation has a process of its own, which ends with it, so nothing of this is undone.
"""

import os
import random
import secrets
import time
from typing import NoReturn

from simulation.loop import HOST, Host, SimLoop

EPOCH_S = 1_800_000_000.0  # wall-clock time at the start of every run


class ProcessEnded(BaseException):
    """What `os._exit` raises in a host, which is dead then."""


def wall_clock_s(loop: SimLoop, host: Host | None) -> float:
    return EPOCH_S + loop.time() + (host.wall_offset if host else 0.0)


def replace_sources(loop: SimLoop, seed: int) -> None:
    """Lets time pass in `loop` alone, each host with its own clock, and makes all chance a function of the seed."""
    chance = random.Random(f"{seed} secrets")

    def monotonic() -> float:
        host = HOST.get()
        return host.monotonic() if host else loop.time()

    def perf_counter() -> float:
        host = HOST.get()
        return loop.time() + (host.busy_s if host else 0.0)

    def leave(status: int) -> NoReturn:
        host = HOST.get()
        if host is None:
            raise SystemExit(status)
        host.die(status)
        raise ProcessEnded(status)

    def rng() -> random.Random:
        host = HOST.get()
        return host.rng if host else chance

    time.monotonic = monotonic
    time.perf_counter = perf_counter
    time.time = lambda: wall_clock_s(loop, HOST.get())
    time.time_ns = lambda: int(time.time() * 1e9)
    time.sleep = _no_sleep
    random.seed(seed)
    random.random = lambda: rng().random()
    random.uniform = lambda low, high: rng().uniform(low, high)
    random.randrange = lambda *bounds: rng().randrange(*bounds)
    random.choice = lambda items: rng().choice(items)
    secrets.token_hex = lambda size=32: rng().randbytes(size).hex()
    secrets.token_bytes = lambda size=32: rng().randbytes(size)
    secrets.randbits = lambda bits: rng().getrandbits(bits)
    os._exit = leave


def _no_sleep(seconds: float) -> None:
    if seconds > 0:
        raise RuntimeError("a blocking sleep: virtual time would not pass")
