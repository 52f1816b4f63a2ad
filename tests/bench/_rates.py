"""What a machine can do at the moment, and how the sides of a comparison take turns."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gpu_worker.models.checkpoint.packing import HugePageAllocator

Side = Callable[[], float]  # does it once; the seconds that took
PAUSE_S = 0.01  # between turns: the threads of OpenMP spin for 5 ms when their work is done
BYTES = 1 << 28  # eight times the last cache: a turn of `read` leaves nothing of the others' data in it
SIDE = 1536


def clocked(call: Callable[[], object]) -> Side:
    def once() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return once


def medians(sides: Mapping[str, Side], repeats: int) -> dict[str, float]:
    """Seconds of each, taken in turns; a first round warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, side in sides.items():
            times[name].append(side())
            time.sleep(PAUSE_S)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


@dataclass(frozen=True, slots=True)
class Rates:
    """Beside some measurement: GB/s of reading and of copying (read and written), GFLOP/s of float32, Gop/s of int8."""

    read: float
    copy: float
    float32: float
    int8: float


class Machine:
    """What torch reaches on all cores, as sides that take turns with what is measured."""

    def __init__(self) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._memory, self._there = HugePageAllocator().allocate(2 * BYTES).view(torch.float32).chunk(2)
        self._memory.uniform_()
        self._there.zero_()
        self._floats = torch.randn(2, SIDE, SIDE)
        self._bytes = torch.randint(-100, 100, (2, SIDE, SIDE), dtype=torch.int8)
        self.sides: dict[str, Side] = {
            "float32 rate": clocked(lambda: self._floats[0] @ self._floats[1]),
            "int8 rate": clocked(lambda: torch._int_mm(self._bytes[0], self._bytes[1])),
            "copy rate": clocked(lambda: self._there.copy_(self._memory)),
            "read rate": clocked(lambda: self._memory.sum()),
        }

    @staticmethod
    def rates(times: Mapping[str, float]) -> Rates:
        products = 2 * SIDE**3 / 1e9
        return Rates(
            read=BYTES / times["read rate"] / 1e9,
            copy=2 * BYTES / times["copy rate"] / 1e9,
            float32=products / times["float32 rate"],
            int8=products / times["int8 rate"],
        )
