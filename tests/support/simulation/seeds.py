"""Runs each seed in a process of its own, which begins as every other one and leaves nothing behind."""

import gc
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from simulation.run import Outcome, Simulation


def parse_seeds(text: str) -> Sequence[int]:
    """The seeds that "500" (the first so many) or "100-199" stands for."""
    first, _, last = text.rpartition("-")
    return range(int(first), int(last) + 1) if first else range(int(last))


def run_seed(seed: int, *, keep_log: bool = False) -> Outcome:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        leave = os._exit  # a run replaces it
        gc.disable()  # what it frees, and when, depends on more than the seed
        os.close(reader)
        outcome = Simulation(seed, keep_log=keep_log).run()
        with os.fdopen(writer, "w") as stream:
            json.dump(asdict(outcome), stream)
        leave(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return Outcome(seed, violations=[f"the process of the run has ended with {status}"])
    return Outcome(**json.loads(text))


class Summary:
    """What many runs have shown."""

    def __init__(self) -> None:
        self.failed: list[int] = []
        self.faults: Counter[str] = Counter()
        self.num_streams = 0
        self.num_runs = 0

    def add(self, outcome: Outcome) -> None:
        self.num_runs += 1
        self.num_streams += outcome.streams
        self.faults.update(outcome.faults)
        if outcome.violations:
            self.failed.append(outcome.seed)

    def report(self) -> str:
        lines = [f"{self.num_runs} runs, {self.num_streams} streams, {len(self.failed)} runs failed: {self.failed}"]
        lines += [f"{count:7} {kind}" for kind, count in sorted(self.faults.items())]
        return "\n".join(lines)
