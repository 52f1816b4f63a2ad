"""Tables of kernels.py: a row per case, printed when it has been measured, ready for a README."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _rates import Machine, Side, medians


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
    """Rows of one kind of op. `octavo` is the side that is measured; beside others, how many times as fast."""

    def __init__(self, plan: Plan, title: str, peers: Sequence[str] = ("torch",), products: bool = False) -> None:
        self._machine = plan.machine
        self._repeats = plan.repeats
        self._match = plan.match
        self._peers = peers
        self._products = products
        speed, rates = (("GB/s", "Gop/s"), "read, copy, Gop/s") if products else (("GB/s",), "read, copy")
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
        times = medians(self._machine.sides | sides, self._repeats)
        rates = self._machine.rates(times)
        seconds = times["octavo"]
        most = rates.int8 if work.int8 else rates.float32
        roof = max(work.num_bytes / (rates.copy if work.writes else rates.read), work.operations / most) / 1e9
        ratios = [f"{times[peer] / seconds:.2f}" if peer in times else "" for peer in self._peers]
        speed = [f"{work.num_bytes / seconds / 1e9:.1f}"]
        state = [f"{rates.read:.0f}", f"{rates.copy:.0f}"]
        if self._products:
            speed.append(f"{work.operations / seconds / 1e9:.0f}" if work.operations else "")
            state.append(f"{most:.0f}")
        share, load = f"{roof / seconds:.0%}", f"{os.getloadavg()[0]:.0f}"
        cells = (case, f"{seconds * 1e3:.3g}", *speed, share, *ratios, f"{', '.join(state)}; {load}")
        print("| " + " | ".join(cells) + " |", flush=True)
