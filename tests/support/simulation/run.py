"""One run of a seed, from a cluster that starts to one in which nothing is left."""

import asyncio
import logging
import traceback
from dataclasses import dataclass, field

from live.oracle import Oracle

from simulation.cluster import Cluster
from simulation.event_log import EventLog
from simulation.loop import SimLoop
from simulation.traffic import Client

QUIET_S = 60.0  # within this time after the last fault, every stream has ended


@dataclass
class Outcome:
    """What a run has shown."""

    seed: int
    violations: list[str] = field(default_factory=list)
    digest: str = ""
    faults: dict[str, int] = field(default_factory=dict)
    streams: int = 0
    virtual_s: float = 0.0
    callbacks: int = 0
    longest_gap_s: float = 0.0
    lines: list[str] = field(default_factory=list)

    def report(self) -> str:
        """One line; if the run has failed, also why, and the command that repeats it."""
        text = f"seed {self.seed}: {self.digest}, {self.streams} streams in {self.virtual_s:.1f} s"
        if self.violations:
            found = "\n".join(self.violations)
            text += f"\n{found}\nrepeat it with: make sim SEEDS={self.seed}-{self.seed} ARGS=--log"
        return "\n".join([*self.lines, text])


class Simulation:
    """A cluster, its clients and its faults. Lives in a process of its own."""

    def __init__(self, seed: int, *, keep_log: bool = False) -> None:
        self.seed = seed
        self.loop = SimLoop()
        self.log = EventLog(self.loop, keep=keep_log)
        root = logging.getLogger()
        root.handlers, root.level = [self.log], logging.INFO
        self.loop.set_exception_handler(self._note_exception)
        self.cluster = Cluster(self.loop, self.log, seed, routers=2, workers=2)
        oracle = Oracle("witness")
        self.clients = [Client(self.cluster, f"c{number}", oracle, 3) for number in range(3)]
        self.violations: list[str] = []

    def run(self) -> Outcome:
        try:
            self.loop.run_until_complete(self._main())
        except Exception:
            self.violations.append(traceback.format_exc())
        self.violations += self.log.errors
        return Outcome(
            seed=self.seed,
            violations=self.violations,
            digest=self.log.digest,
            faults=dict(self.log.faults),
            streams=sum(client.ended for client in self.clients),
            virtual_s=self.loop.time(),
            callbacks=self.loop.num_callbacks,
            longest_gap_s=max(client.longest_gap_s for client in self.clients),
            lines=self.log.lines,
        )

    def _note_exception(self, loop: SimLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        text = "".join(traceback.format_exception(error)) if isinstance(error, Exception) else str(error)
        self.log.errors.append(f"{context.get('message')}: {text}")

    async def _main(self) -> None:
        self.cluster.start()
        for client in self.clients:
            client.start()
        _, going = await asyncio.wait([client.task for client in self.clients], timeout=QUIET_S)
        for client in self.clients:
            if client.task in going:
                self.violations.append(f"{client.name} is at its stream {client.ended} after {QUIET_S} s")
            elif error := client.task.exception():
                self.violations.append("".join(traceback.format_exception(error)))
