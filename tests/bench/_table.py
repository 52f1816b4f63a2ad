"""Tables of kernels.py: a row per case, printed when it has been measured, ready for a README."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from _rates import Machine, Side, medians

PEERS = ("torch", "llama.cpp", "vLLM-CPU")
HEAD = (
    "case",
    "ms",
    "GB/s",
    "Gop/s",
    "of the nearer roof",
    *(f"÷ {peer}" for peer in PEERS),
    "read, copy, Gop/s; load",
)


@dataclass(frozen=True, slots=True)
class Work:
    """What an op has to do at least; whichever of the two takes the machine longer is its roof."""

    num_bytes: float
    operations: float = 0
    writes: bool = False  # the bytes are half read and half written, so their roof is copying
    int8: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How the user wants it measured."""

    machine: Machine
    repeats: int
    quick: bool  # fewer sizes
    match: re.Pattern[str]  # rows to measure, by their first cell


class Table:
    """Rows of one kind of op. `octavo` is the side that is measured; the speed of others is given as a ratio."""

    def __init__(self, plan: Plan, title: str) -> None:
        self._machine = plan.machine
        self._repeats = repeats = plan.repeats
        self._match = plan.match
        print(f"\n**{title}**, medians of {repeats}, sides in turns\n")
        print("| " + " | ".join(HEAD) + " |")
        print("|" + "---|" * len(HEAD), flush=True)

    def wants(self, case: str) -> bool:
        return bool(self._match.search(case))

    def row(self, case: str, work: Work, sides: Mapping[str, Side]) -> None:
        """The machine's own turns come first, and leave the caches empty."""
        if not self.wants(case):
            return
        times = medians(self._machine.sides | sides, self._repeats)
        rates = self._machine.rates(times)
        seconds = times["octavo"]
        most = rates.int8 if work.int8 else rates.float32
        roof = max(work.num_bytes / (rates.copy if work.writes else rates.read), work.operations / most) / 1e9
        ratios = [f"{times[peer] / seconds:.2f}×" if peer in times else "" for peer in PEERS]
        speed = (
            f"{work.num_bytes / seconds / 1e9:.1f}",
            f"{work.operations / seconds / 1e9:.0f}" if work.operations else "",
        )
        state = f"{rates.read:.1f}, {rates.copy:.1f}, {most:.0f}; {os.getloadavg()[0]:.1f}"
        cells = (case, f"{seconds * 1e3:.3g}", *speed, f"{roof / seconds:.0%}", *ratios, state)
        print("| " + " | ".join(cells) + " |", flush=True)
