"""One run of a seed, from a cluster that starts to one in which nothing is left."""

import asyncio
import logging
import traceback
from collections import Counter
from dataclasses import dataclass, field

from live.oracle import Oracle

from simulation.cluster import Cluster
from simulation.event_log import EventLog
from simulation.faults import FaultMenu
from simulation.leaks import leaks
from simulation.loop import SimLoop, SimTask
from simulation.traffic import LOSSES, Client

NUM_CLIENTS, NUM_STREAMS, JSON_STREAMS = 3, 4, 12
CUTS = {"connection reset", "partition one way", "partition both ways", "machine vanished", "router killed"}
# Faults by which a router may lose its lease.
ROUTER_LOSSES = {"router killed", "router paused", "router left", "machine vanished", "killed in a call"}
ROUTER_LOSSES |= {"partition one way", "partition both ways", "store paused", "store restarted", "slow link"}
STREAMS, REFUSED, FETCHED = "streams", "appends refused", "blocks of standbys fetched"
INSIDE_JSON = "inside JSON: "
POISONOUS, OF_SEEDS = 9, 10  # every tenth seed, the last of ten, has several poison requests and no other faults
NUM_POISONS, POISON_SHARE = 4, 0.3
MAX_POISONED = 3  # workers that one poison request may kill
REST_S = 20.0  # and within this time after the last stream, nothing of them is left
QUIET_S = 60.0  # within this time after the last fault, every stream has ended


@dataclass
class Outcome:
    """What a run has shown."""

    seed: int
    violations: list[str] = field(default_factory=list)
    digest: str = ""
    counts: dict[str, int] = field(default_factory=dict)  # faults where they had an effect, streams, and what else came
    virtual_s: float = 0.0
    settled_s: float = 0.0  # from the end of the last fault to that of the last stream
    lines: list[str] = field(default_factory=list)

    def report(self) -> str:
        """One line; if the run has failed, also why, and the command that repeats it."""
        text = f"seed {self.seed}: {self.digest}, {self.counts.get(STREAMS, 0)} streams in {self.virtual_s:.1f} s"
        if changes := sum(count for what, count in self.counts.items() if what.startswith(INSIDE_JSON)):
            text += f", {changes} changes of owner inside JSON"
        if self.violations:
            found = "\n".join(self.violations)
            text += f"\n{found}\nrepeat it with: make sim SEEDS={self.seed}-{self.seed} ARGS=--log"
        return "\n".join([*self.lines, text])


class Simulation:
    """A cluster, its clients and its faults. Lives in a process of its own."""

    def __init__(self, seed: int, *, keep_log: bool = False, json_share: float = 0.0) -> None:
        self.seed = seed
        self.loop = SimLoop()
        self.log = EventLog(self.loop, keep=keep_log)
        root = logging.getLogger()
        root.handlers, root.level = [self.log], logging.INFO
        self.loop.set_exception_handler(self._note_exception)
        self.is_poisonous = seed % OF_SEEDS == POISONOUS and not json_share
        self.cluster = Cluster(self.loop, self.log, seed, routers=2, workers=3 if self.is_poisonous else 2)
        if self.is_poisonous:
            self.cluster.poisons_left, self.cluster.poison_share = NUM_POISONS, POISON_SHARE
        self.cluster.json_share = json_share
        oracle = Oracle("witness")
        names = [f"c{number}" for number in range(NUM_CLIENTS)]
        self.faults = FaultMenu(self.cluster, names)
        num_streams = JSON_STREAMS if json_share else NUM_STREAMS
        self.clients = [Client(self.cluster, name, oracle, num_streams, self._is_lossy) for name in names]
        self.violations: list[str] = []
        self.settled_s = 0.0

    def _is_lossy(self) -> bool:
        return self.faults.is_lossy

    def run(self) -> Outcome:
        try:
            self.loop.run_until_complete(self._main())
        except Exception:
            self.violations.append(traceback.format_exc())
        self.violations += self.log.errors
        monitor, fetchers = self.cluster.store.monitor, self.cluster.fetchers
        counts = self.log.faults + Counter({f"{INSIDE_JSON}{what}": n for what, n in monitor.inside_json.items()})
        counts += monitor.to_buddies
        counts[STREAMS] = sum(client.ended for client in self.clients)
        counts[REFUSED] = monitor.num_refused  # because their writer was the owner no more
        counts[FETCHED] = sum(fetcher.num_standby_fetched for fetcher in fetchers)
        digest, virtual_s = self.log.digest, self.loop.time()
        return Outcome(self.seed, self.violations, digest, dict(counts), virtual_s, self.settled_s, self.log.lines)

    def _note_exception(self, loop: SimLoop, context: dict[str, object]) -> None:
        task = context.get("future") or context.get("task")
        if isinstance(task, SimTask) and task.host is not None and not task.host.alive:
            return  # nobody is left who could have looked at it
        error = context.get("exception")
        text = "".join(traceback.format_exception(error)) if isinstance(error, Exception) else str(error)
        self.log.errors.append(f"{context.get('message')}: {text}")

    async def _main(self) -> None:
        self.cluster.start()
        for client in self.clients:
            client.start()
        if self.cluster.json_share:
            await self.faults.serve_owner_changes()
        elif not self.is_poisonous:
            await self.faults.serve()
        faults_ended = self.loop.time()
        _, going = await asyncio.wait([client.task for client in self.clients], timeout=QUIET_S)
        for client in self.clients:
            if client.task in going:
                self.violations.append(f"{client.name}: stream {client.ended} has not ended after {QUIET_S:.0f} s")
            elif error := client.task.exception():
                self.violations.append("".join(traceback.format_exception(error)))
        self.settled_s = self.loop.time() - faults_ended
        await self._come_to_rest()
        self._judge_end()

    def _judge_end(self) -> None:
        """What the run as a whole must not have done."""
        happened = set(self.log.faults)
        self.violations += self.cluster.store.monitor.violations
        self.violations += [runner.first_mismatch for runner in self.cluster.runners if runner.mismatches]
        if not happened & ROUTER_LOSSES:  # the clients of a dead router get more time, also those that had left
            for client in self.clients:
                self.violations += [f"{name} ran to its end, though its client had left" for name in client.outlived()]
        # Other deaths excuse a request, and a worker whose renewals do not arrive counts as dead.
        if not (self.is_poisonous or happened & (LOSSES | {"lost request", "late request"}) or self.faults.is_lossy):
            allowed = MAX_POISONED + bool(happened & CUTS)  # a death at an admission may go unseen with its connection
            for prompt, number in self.cluster.poisoned.items():
                if number > allowed:
                    self.violations.append(f"the prompt {prompt} has killed {number} workers")

    async def _come_to_rest(self) -> None:
        """Waits until nothing is left of the requests."""
        ends = self.loop.time() + REST_S
        while found := leaks(self.cluster):
            if self.loop.time() > ends:
                self.violations += [f"{what}, {REST_S:.0f} s after the last stream" for what in found]
                return
            await asyncio.sleep(0.25)
        self.log.add("-", "at rest")
