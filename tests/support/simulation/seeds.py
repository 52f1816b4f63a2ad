"""Runs each seed in a process of its own, which begins as every other one and leaves nothing behind."""

import gc
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from simulation.cluster import BUDDY_DIED, OWNER_DIED
from simulation.faults import EVERY_KIND
from simulation.run import FETCHED, INSIDE_JSON, REFUSED, STREAMS, Outcome, Simulation
from simulation.store_monitor import GOES_ON, MOVES_TO_BUDDY

ENOUGH_RUNS = 60  # so many show every kind of fault


def parse_seeds(text: str) -> Sequence[int]:
    """The seeds that "500" (the first so many) or "100-199" stands for."""
    first, _, last = text.rpartition("-")
    return range(int(first), int(last) + 1) if first else range(int(last))


def run_seed(seed: int, *, keep_log: bool = False, json_share: float = 0.0) -> Outcome:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        leave = os._exit  # a run replaces it
        gc.disable()  # what it frees, and when, depends on more than the seed
        os.close(reader)
        outcome = Simulation(seed, keep_log=keep_log, json_share=json_share).run()
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
        self.counts: Counter[str] = Counter()
        self.num_runs = 0
        self.longest_s = (0.0, 0)

    def add(self, outcome: Outcome) -> None:
        self.num_runs += 1
        self.counts.update(outcome.counts)
        self.longest_s = max(self.longest_s, (outcome.settled_s, outcome.seed))
        if outcome.violations:
            self.failed.append(outcome.seed)

    @property
    def missing(self) -> list[str]:
        """What should have happened in so many runs, and has not. Those of JSON have faults of few kinds."""
        if self.num_runs < ENOUGH_RUNS or any(what.startswith(INSIDE_JSON) for what in self.counts):
            return []
        others = (REFUSED, FETCHED, "chat with pictures", OWNER_DIED, BUDDY_DIED, GOES_ON, MOVES_TO_BUDDY)
        return [kind for kind in (*EVERY_KIND, *others) if not self.counts[kind]]

    @property
    def is_bad(self) -> bool:
        return bool(self.failed or self.missing)

    def report(self) -> str:
        lines = [f"{self.num_runs} runs, {self.counts[STREAMS]} streams, {len(self.failed)} runs failed: {self.failed}"]
        longest_s, seed = self.longest_s
        lines.append(f"the last stream ended at most {longest_s:.1f} s after the last fault (seed {seed})")
        lines += [f"{count:7} {kind}" for kind, count in sorted(self.counts.items())]
        lines += [f"no {kind} has happened" for kind in self.missing]
        return "\n".join(lines)
