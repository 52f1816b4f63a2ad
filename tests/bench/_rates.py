"""What a machine can do, for kernels to be compared with."""

import os
import time
from collections.abc import Callable

import torch

from gpu_worker.models.huge_pages import HugePages

BYTES = 1 << 29  # what is read: more than four times any last cache of these machines
SIDE = 1536


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return times


def best(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least of each."""
    return {name: min(seconds) for name, seconds in in_turns(calls, repeats).items()}


class Rates:
    """Measured by torch on all cores: GB/s of reading memory, GFLOP/s of float32, Gop/s of int8 products."""

    def __init__(self) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._memory = HugePages().take(BYTES).view(torch.float32).uniform_()
        self._floats = torch.randn(2, SIDE, SIDE)
        self._bytes = torch.randint(-100, 100, (2, SIDE, SIDE), dtype=torch.int8)
        self.read = self.float32 = self.int8 = 0.0
        self.measure(3)

    def read_memory(self) -> object:
        """Reads BYTES of memory, which no cache holds, in huge pages."""
        return self._memory.sum()

    def measure(self, repeats: int) -> None:
        """Again; what was reached once is what the machine can do."""
        times = best(
            {
                "read": self.read_memory,
                "float32": lambda: self._floats[0] @ self._floats[1],
                "int8": lambda: torch._int_mm(self._bytes[0], self._bytes[1]),
            },
            repeats,
        )
        self.read = max(self.read, BYTES / times["read"] / 1e9)
        self.float32 = max(self.float32, 2 * SIDE**3 / times["float32"] / 1e9)
        self.int8 = max(self.int8, 2 * SIDE**3 / times["int8"] / 1e9)

    def __str__(self) -> str:
        return f"read {self.read:.1f} GB/s, float32 {self.float32:.0f} GFLOP/s, int8 {self.int8:.0f} Gop/s (torch)"
