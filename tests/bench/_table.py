"""Tables of kernels.py: a row per case, printed when measured, beside what the machine can do at the moment."""

import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from _rates import rate_side

from gpu_worker.models.packed.weight_memory import HugePageAllocator

Side = Callable[[], float]  # does it once; the seconds that took
PAUSE_S = 0.01  # between turns: the threads of OpenMP spin for 5 ms when their work is done
BYTES = 1 << 28  # eight times the last cache: a turn of `read` leaves nothing of the others' data in it


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


class Machine:
    """What torch reads and copies on all cores, as sides that take turns with what is measured."""

    def __init__(self) -> None:
        self.threads = len(os.sched_getaffinity(0))
        torch.set_num_threads(self.threads)
        self._memory, self._there = HugePageAllocator().allocate(2 * BYTES).view(torch.float32).chunk(2)
        self._memory.uniform_()
        self._there.zero_()
        self.sides: dict[str, Side] = {
            "copy rate": clocked(lambda: self._there.copy_(self._memory)),
            "read rate": clocked(lambda: self._memory.sum()),
        }


@dataclass(frozen=True, slots=True)
class Work:
    """What an op has to do at least; whichever of the two takes the machine longer is its roof."""

    num_bytes: float
    operations: float = 0
    instruction: str = ""  # what multiplies, of _rates.py: its own rate is the roof
    times: int = 1  # how often it multiplies each number
    writes: bool = False  # the bytes are half read and half written, so their roof is copying


@dataclass(frozen=True, slots=True)
class Plan:
    """How the user wants it measured."""

    machine: Machine
    repeats: int
    quick: bool  # fewer sizes
    match: re.Pattern[str]  # rows to measure, by their first cell


class Table:
    """Rows of one kind of op. `octavo` is the side that is measured; beside others, how many times as fast."""

    def __init__(self, plan: Plan, title: str, peers: Sequence[str] = ("torch",), products: bool = False) -> None:
        self._machine = plan.machine
        self._repeats = plan.repeats
        self._match = plan.match
        self._peers = peers
        self._products = products
        speed, rates = (("GB/s", "Gop/s"), "read, copy, instruction's Gop/s") if products else (("GB/s",), "read, copy")
        head = ("case", "ms", *speed, "of the nearer roof", *(f"× {peer}" for peer in peers), f"{rates}; load")
        print(f"\n**{title}**, medians of {plan.repeats}, sides in turns\n")
        print("| " + " | ".join(head) + " |")
        print("|" + "---|" * len(head), flush=True)

    def wants(self, case: str) -> bool:
        return bool(self._match.search(case))

    def row(self, case: str, work: Work, sides: Mapping[str, Side]) -> None:
        """The machine's own turns come first, and leave the caches empty."""
        if not self.wants(case):
            return
        machine, most = dict(self._machine.sides), 0.0
        if work.instruction:
            machine["instruction"], most = rate_side(work.instruction, self._machine.threads)
        times = medians(machine | sides, self._repeats)
        read, copy = BYTES / times["read rate"] / 1e9, 2 * BYTES / times["copy rate"] / 1e9
        seconds = times["octavo"]
        roof = work.num_bytes / (copy if work.writes else read) / 1e9
        ratios = [f"{times[peer] / seconds:.2f}" if peer in times else "" for peer in self._peers]
        speed = [f"{work.num_bytes / seconds / 1e9:.1f}"]
        state = [f"{read:.0f}", f"{copy:.0f}"]
        if self._products:
            speed.append(f"{work.operations / seconds / 1e9:.0f}" if work.operations else "")
        if work.instruction:
            state.append(f"{work.instruction} {most / times['instruction'] / 1e9:.0f}")
            roof = max(roof, work.times * work.operations / most * times["instruction"])
        share, load = f"{roof / seconds:.0%}", f"{os.getloadavg()[0]:.0f}"
        cells = (case, f"{seconds * 1e3:.3g}", *speed, share, *ratios, f"{', '.join(state)}; {load}")
        print("| " + " | ".join(cells) + " |", flush=True)
